"""A diff as one self-contained HTML page: both modules side by side.

A click on an instruction goes to its counterpart. The page names no other file or
address, follows the reader's dark or light setting, and every text that comes from the
programs goes through `html.escape`. Browsers lay out only what is looked at, so that
modules of tens of thousands of instructions stay usable.
"""

from __future__ import annotations

import html
from collections.abc import Iterator

from hlo_tools.hlo.diff_result import MINOR_PLACES, DiffResult, InstructionRef, Place
from hlo_tools.hlo.diff_text import headline, summary
from hlo_tools.hlo.ir import HloComputation, HloModule
from hlo_tools.hlo.printer import print_instruction

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_NAMES_SHOWN = 4
_CSS = """
:root { color-scheme: light dark;
  --page: light-dark(#f6f7f9, #14171c); --card: light-dark(#fff, #1c2027);
  --text: light-dark(#1b1f26, #e4e7ec); --soft: light-dark(#5c6675, #9aa4b2);
  --line: light-dark(#dfe3e9, #303742); --blue: light-dark(#2563c9, #6ea8fe);
  --gone: light-dark(#ffe3e3, #4a1f24); --new: light-dark(#dcf5e3, #173a26);
  --other: light-dark(#fff1cf, #453813); --here: light-dark(#cfe2ff, #1d3d6b); }
* { box-sizing: border-box; }
body { margin: 0; display: flex; flex-direction: column; height: 100vh;
  background: var(--page); color: var(--text); font: 14px/1.5 system-ui, sans-serif; }
header { padding: 14px 20px; max-height: 38vh; overflow: auto;
  border-bottom: 1px solid var(--line); }
h1 { font-size: 18px; margin: 0; } h2 { font-size: 13px; margin: 0; }
ol { margin: 6px 0; padding-left: 24px; } .soft { color: var(--soft); }
a { color: var(--blue); text-decoration: none; } a:hover { text-decoration: underline; }
main { flex: 1; display: flex; min-height: 0; }
section { flex: 1; min-width: 0; overflow: auto; background: var(--card);
  border-right: 1px solid var(--line); font: 12px/1.6 ui-monospace, monospace; }
section > h2 { position: sticky; top: 0; left: 0; z-index: 1; padding: 6px 12px;
  background: var(--page); font-family: system-ui, sans-serif;
  border-bottom: 1px solid var(--line); }
article { content-visibility: auto; contain-intrinsic-size: auto 600px; }
h3 { font: inherit; color: var(--soft); margin: 10px 12px 0; }
p { margin: 0; padding: 0 12px; white-space: pre; width: max-content; min-width: 100%; }
p[data-to] { cursor: pointer; }
.removed { background: var(--gone); } .added { background: var(--new); }
.changed { background: var(--other); } .here { background: var(--here); }
"""
_SCRIPT = """
function show(line) {
  if (!line) return;
  for (const old of document.querySelectorAll('.here')) old.classList.remove('here');
  line.classList.add('here');
  line.scrollIntoView({ block: 'center', inline: 'nearest' });
}
function both(line) {
  const other = document.getElementById(line.dataset.to);
  show(line);
  if (other) { show(other); line.classList.add('here'); }
}
addEventListener('click', (event) => {
  const line = event.target.closest('p[data-to]');
  if (line) both(line);
  const link = event.target.closest('a[href^="#"]');
  if (link) {
    event.preventDefault();
    const found = document.getElementById(link.hash.slice(1));
    lead(found);
  }
});
function lead(line) { if (line) line.dataset.to ? both(line) : show(line); }
lead(document.getElementById(location.hash.slice(1))
  || document.querySelector('.removed, .added, .changed'));
"""


def page(result: DiffResult, a: HloModule, b: HloModule) -> str:
    """Returns the page.

    Args:
        result: of `hlo_tools.hlo.diff.diff(a, b)`.
        a, b: the modules.
    """
    sides = _Side("a", a, result), _Side("b", b, result)
    title = f"{result.names[0]} and {result.names[1]}"
    said = "same program" if result.is_same else f"different: {summary(result)}"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{html.escape(title)}</title><style>{_CSS}</style>",
        f"<header><h1>{html.escape(title)}</h1><div>{html.escape(said)}</div>",
        *_places(result, sides),
        "</header><main>",
        *sides[0].lines(sides[1]),
        *sides[1].lines(sides[0]),
        f"</main><script>{_SCRIPT}</script></html>\n",
    ]
    return "\n".join(parts)


class _Side:
    """One of the modules."""

    def __init__(self, side: str, module: HloModule, result: DiffResult):
        self.side, self.module = side, module
        names = (f"{c.name}/{i.name}" for c in module.computations for i in c)
        self.ids = {name: f"{side}{n}" for n, name in enumerate(names)}
        pairs = result.counterparts.items()
        self.counterparts = {
            (x if side == "a" else y): (y if side == "a" else x) for x, y in pairs
        }
        self.changes: dict[str, str] = {}
        for place in _all_places(result):
            for change in place.changes:
                ref = getattr(change, side)
                if ref is not None:
                    self.changes[_name(ref)] = change.kind

    def lines(self, other: _Side) -> Iterator[str]:
        """Yields the module's instructions, each with the place of its counterpart."""
        title = self.module.filename or self.module.name
        yield f"<section><h2>{self.side}: {html.escape(title)}</h2>"
        for computation in self.module.computations:
            yield f"<article><h3>{html.escape(_head(computation))}</h3>"
            for instruction in computation:
                name = f"{computation.name}/{instruction.name}"
                kind = self.changes.get(name)
                attributes = f" id={self.ids[name]}"
                attributes += f" class={kind}" if kind else ""
                target = other.ids.get(self.counterparts.get(name, ""))
                attributes += f" data-to={target}" if target else ""
                text = html.escape(print_instruction(instruction))
                yield f"<p{attributes}>{text}</p>"
            yield "</article>"
        yield "</section>"

    def link(self, ref: InstructionRef) -> str:
        """Returns a link to an instruction."""
        text = html.escape(f"{ref.opcode} {ref.shape}")
        place = self.ids.get(_name(ref))
        return f'<a href="#{place}">{text}</a>' if place else text


def _name(ref: InstructionRef) -> str:
    return f"{ref.computation}/{ref.name}"


def _head(computation: HloComputation) -> str:
    return ("ENTRY " if computation.is_entry else "") + computation.name


def _all_places(result: DiffResult) -> Iterator[Place]:
    for place in result.places:
        yield place
        yield from place.repeats


def _places(result: DiffResult, sides: tuple[_Side, _Side]) -> Iterator[str]:
    """Yields the list of differences."""
    yield "<ol>"
    for place in result.places:
        if place.kind in MINOR_PLACES:
            continue
        words = [html.escape(headline(place))]
        for side in sides:
            refs = place.instructions(side.side)
            links = ", ".join(side.link(ref) for ref in refs[:_NAMES_SHOWN])
            more = f" and {len(refs) - _NAMES_SHOWN} more" * (len(refs) > _NAMES_SHOWN)
            if refs:
                words.append(f"<span class=soft>{side.side}:</span> {links}{more}")
        where = (*place.sources("a"), *place.sources("b"))[:1]
        words += [f"<span class=soft>{html.escape(x)}</span>" for x in where]
        yield f"<li>{' &middot; '.join(words)}</li>"
    yield "</ol>"
    for note in result.notes:
        yield f"<div class=soft>{html.escape(note.text)}</div>"
