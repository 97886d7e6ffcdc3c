"""A `RewriteReport` as one self-contained HTML page.

The page names no other file or address (its content security policy forbids
them), follows the reader's dark or light setting, and is complete without
JavaScript; with it the tables sort and one site's details show at a time.
Every text that comes from the program goes through `html.escape`.
"""

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from hlo_tools.report import (
    BASELINE,
    Candidate,
    NearMiss,
    PassReport,
    RewriteReport,
    SiteReport,
)
from hlo_tools.report_format import (
    SiteGroup,
    caret_line,
    describe_attributes,
    describe_gradient,
    fold_sites,
    format_bytes,
    format_flops,
    format_seconds,
    format_value,
    printable,
    short_location,
    source_line,
    split_location,
)
from hlo_tools.report_text import measured_line

_CSS = """
:root { color-scheme: light dark;
  --page: light-dark(#f6f7f9, #14171c); --card: light-dark(#fff, #1c2027);
  --text: light-dark(#1b1f26, #e4e7ec); --soft: light-dark(#5c6675, #9aa4b2);
  --line: light-dark(#dfe3e9, #303742); --hover: light-dark(#eef2f8, #262c36);
  --blue: light-dark(#2563c9, #6ea8fe); --green: light-dark(#18794e, #4cc38a);
  --amber: light-dark(#8a5a00, #e5b453); --red: light-dark(#c02b2b, #ff8080);
  --violet: light-dark(#7a3fb5, #c79bf2); --bar: light-dark(#b9c3d1, #4a5565); }
:root[data-theme=light] { color-scheme: light; }
:root[data-theme=dark] { color-scheme: dark; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1240px; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
header { display: flex; gap: 16px; align-items: start; }
header div { flex: 1; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 10px; }
h3 { font-size: 13px; margin: 18px 0 6px; color: var(--soft); }
.summary { margin: 4px 0 18px; font-size: 16px; }
.soft, th { color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 16px; margin-bottom: 18px; overflow-x: auto; }
.columns { display: grid; gap: 18px; grid-template-columns: minmax(0, 3fr)
  minmax(0, 2fr); align-items: start; }
@media (max-width: 960px) { .columns { grid-template-columns: minmax(0, 1fr); } }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 8px; border-bottom: 1px solid var(--line);
  vertical-align: top; }
tr:last-child > td { border-bottom: 0; }
th { font-weight: 600; white-space: nowrap; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
th button { all: unset; cursor: pointer; }
button:focus-visible, a:focus-visible { outline: 2px solid var(--blue); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
tr.pick { cursor: pointer; }
tr.pick:hover, tr.chosen { background: var(--hover); }
a { color: var(--blue); text-decoration: none; white-space: nowrap; }
.status { border: 1px solid; border-radius: 10px; padding: 0 8px; font-size: 12px;
  white-space: nowrap; }
.bound { color: var(--green); } .outlined { color: var(--blue); }
.inlined { color: var(--amber); } .near-miss { color: var(--violet); }
.failed { color: var(--red); }
.where, pre { font: 13px/1.45 ui-monospace, monospace; }
.where, dd, p { overflow-wrap: anywhere; }
.word { white-space: nowrap; }
.share { width: 35%; }
.detail { position: sticky; top: 18px; max-height: calc(100vh - 36px);
  overflow-y: auto; }
pre { background: var(--page); border-radius: 6px; padding: 10px; overflow-x: auto; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr);
  gap: 3px 14px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; }
.bars { display: grid; gap: 6px 10px; align-items: center; font-size: 14px;
  grid-template-columns: max-content minmax(0, 1fr) max-content; }
.bar { height: 12px; border-radius: 3px; background: var(--bar); min-width: 2px; }
.bar.used { background: var(--green); }
.toggle { font: inherit; color: inherit; background: var(--card); cursor: pointer;
  border: 1px solid var(--line); border-radius: 6px; padding: 4px 12px; }
[hidden] { display: none; }
"""

_SCRIPT = """
"use strict";
const root = document.documentElement;
const toggle = document.querySelector(".toggle");
toggle.hidden = false;
toggle.onclick = () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
};
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.onclick = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.key ?? "";
      const order = (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
      const number = (row) => (key(row) === "" ? NaN : Number(key(row)));
      const compare = (a, b) => {
        const x = number(a), y = number(b);
        return Number.isNaN(x) || Number.isNaN(y) ? order(a, b) : x - y;
      };
      const rows = [...table.tBodies[0].rows].sort(compare);
      table.tBodies[0].append(...(up ? rows : rows.reverse()));
    };
  });
}
const details = [...document.querySelectorAll(".detail")];
function choose(id) {
  details.forEach((detail) => { detail.hidden = detail.id !== id; });
  document.querySelectorAll("tr.pick").forEach((row) => {
    row.classList.toggle("chosen", row.dataset.detail === id);
  });
}
document.querySelectorAll("tr.pick").forEach((row) => {
  row.onclick = (event) => { event.preventDefault(); choose(row.dataset.detail); };
});
const wanted = location.hash.slice(1);
if (details.length)
  choose(details.some((d) => d.id === wanted) ? wanted : details[0].id);
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render_html(report: RewriteReport) -> str:
    """The whole page; see `RewriteReport.html`."""
    title = f"{report.module or 'module'} on {report.target or 'unknown target'}"
    groups = fold_sites(report.sites)
    body = [_header(title, report)]
    if groups:
        details = "".join(_detail(i, group) for i, group in enumerate(groups))
        body.append(
            f'<div class="columns"><section class="card"><h2>Sites</h2>'
            f"{_site_table(groups)}</section><div>{details}</div></div>"
        )
    if report.passes:
        body.append(_pass_table(report.passes))
    if report.notes:
        notes = "".join(f"<p>{_text(note)}</p>" for note in report.notes)
        body.append(f'<section class="card"><h2>Notes</h2>{notes}</section>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_CSS}</style></head>\n<body>"
        + "\n".join(body)
        + f"\n<script>{_SCRIPT}</script></body></html>\n"
    )


def _text(value: Any) -> str:
    """`value` as text that can stand anywhere in the page."""
    return html.escape(printable(str(value)), quote=True)


def _header(title: str, report: RewriteReport) -> str:
    facts = [f"{name} {version}" for name, version in report.versions.items()]
    facts.append(f"pipeline {format_seconds(report.seconds)}")
    if report.measured is not None:
        facts.append(measured_line(report.measured))
    return (
        f"<header><div><h1>{_text(title)}</h1>"
        f'<p class="summary">{_text(report.summary())}<br>'
        f'<span class="soft">{_text(", ".join(facts))}</span></p></div>'
        '<button class="toggle" hidden>Dark / light</button></header>'
    )


def _cell(shown: str, key: Any, kind: str = "") -> str:
    """A table cell: `shown` is markup, `key` what the column sorts by."""
    attribute = f' class="{kind}"' if kind else ""
    return f'<td{attribute} data-key="{_text(key)}">{shown}</td>'


def _head(names: Iterable[str], numbers: Iterable[str]) -> str:
    cells = "".join(
        f'<th scope="col"{" class=number" * (name in numbers)}>{name}</th>'
        for name in names
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _site_table(groups: Sequence[SiteGroup]) -> str:
    names = ("Site", "Where", "Status", "XLA", "Bound", "Saves")
    rows = "".join(_site_row(number, group) for number, group in enumerate(groups))
    return (
        f'<table class="sortable">{_head(names, names[3:])}'
        f"<tbody>{rows}</tbody></table>"
        '<p class="soft">Predicted times and bytes of one execution.</p>'
    )


def _site_row(number: int, group: SiteGroup) -> str:
    site = group.site
    before = site.predicted_seconds.get(BASELINE)
    after = site.predicted_seconds.get(site.implementation or "")
    count = f' <span class="soft">x{group.count}</span>' if group.count > 1 else ""
    words = f"{site.pattern} {describe_attributes(site.attributes)}".split()
    what = " ".join(f'<span class="word">{_text(word)}</span>' for word in words)
    status = f'<span class="status {_text(site.status)}">{_text(site.status)}</span>'
    with_name = f" {_text(site.implementation)}" if site.implementation else ""
    cells = (
        _cell(f'<a href="#site-{number}">{_text(site.id)}</a>{count}', site.id),
        _cell(
            f'<span class="where">{_text(short_location(site.location))}</span>'
            f'<br><span class="soft">{what}</span>',
            site.location or "",
        ),
        _cell(status + with_name, site.status),
        _cell(_time(before), _key(before), "number"),
        _cell(_time(after), _key(after), "number"),
        _cell(
            format_bytes(site.bytes_saved) if site.bytes_saved else "",
            int(site.bytes_saved),
            "number",
        ),
    )
    return f'<tr class="pick" data-detail="site-{number}">{"".join(cells)}</tr>'


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _key(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return ""
    return repr(float(seconds))


def _detail(number: int, group: SiteGroup) -> str:
    """Everything about one site, shown beside the table."""
    site = group.site
    status = f'<span class="status {_text(site.status)}">{_text(site.status)}</span>'
    parts = [f"<h2>{_text(group.label)} {status}</h2>"]
    if site.location:
        parts.append(f'<p class="where">{_text(site.location)}</p>')
    if site.reason:
        parts.append(f"<p>{_text(site.reason)}</p>")
    if site.near_miss is not None:
        parts.append(_near_miss(site.near_miss))
    parts.append(_bars(site))
    parts.append(_facts("Gains", _gain_facts(site)))
    parts.append(_facts("Verification", _verify_facts(site)))
    parts.append(_facts("Configuration", site.config))
    parts.append(_facts("Attributes", site.attributes))
    if site.executions is not None:
        parts.append(_facts("Program", {"executions in a run": site.executions}))
    if group.count > 1:
        parts.append(f"<h3>Equal sites</h3><p>{_text(', '.join(group.ids))}</p>")
    return f'<section class="card detail" id="site-{number}">{"".join(parts)}</section>'


def _near_miss(miss: NearMiss) -> str:
    shown = ""
    file, line = split_location(miss.location or "")
    source = source_line(file, line)
    if source:
        code = source.lstrip()
        shown = f"<pre>{line} | {_text(code)}\n"
        shown += f"{' ' * len(str(line))} | {caret_line(code)}</pre>"
    facts = {
        "first differing operation": miss.operation,
        "at": miss.location or "unknown",
        "got": miss.got,
        "expected": miss.expected,
        "smallest edit": miss.edit,
    }
    return _facts("Near miss", facts) + shown


def _gain_facts(site: SiteReport) -> dict[str, Any]:
    avoided = site.recompute_avoided_flops
    return {
        "memory saved": format_bytes(site.bytes_saved) if site.bytes_saved else None,
        "recomputation avoided": format_flops(avoided) if avoided else None,
        "gradient": site.gradient and describe_gradient(site.gradient),
    }


def _verify_facts(site: SiteReport) -> dict[str, Any]:
    check = site.verify
    if check is None:
        return {}
    return {
        "result": "within tolerance" if check.passed else "failed",
        "largest error": f"{check.max_error:.3g}",
        "tolerance": f"{check.tolerance:.3g}",
        "detail": check.detail,
    }


def _facts(title: str, facts: dict[str, Any]) -> str:
    rows = "".join(
        f"<dt>{_text(name)}</dt><dd>{_text(format_value(value))}</dd>"
        for name, value in facts.items()
        if value is not None and value != ""
    )
    return f"<h3>{title}</h3><dl>{rows}</dl>" if rows else ""


def _bars(site: SiteReport) -> str:
    """Bars of the predicted times, then who can not run and why."""
    times = {c.name: c.predicted_seconds for c in site.candidates if c.supported}
    times |= site.predicted_seconds
    known = {n: t for n, t in times.items() if t is not None and math.isfinite(t)}
    longest = max(known.values(), default=0.0)
    used = site.implementation or BASELINE
    bars = "".join(
        f"<span>{_text(name)}</span>"
        f'<div class="bar{" used" * (name == used)}" '
        f'style="width: {100 * seconds / longest if longest > 0 else 0:.1f}%"></div>'
        f"<span>{format_seconds(seconds)}</span>"
        for name, seconds in sorted(known.items(), key=lambda item: item[1])
    )
    shown = f'<h3>Predicted time</h3><div class="bars">{bars}</div>' if bars else ""
    return shown + _refusals([c for c in site.candidates if not c.supported])


def _refusals(candidates: Sequence[Candidate]) -> str:
    reasons = {c.name: c.reason or "no reason given" for c in candidates}
    return _facts("Can not run here", reasons)


def _pass_table(passes: Sequence[PassReport]) -> str:
    longest = max((item.seconds for item in passes), default=0.0) or 1.0
    names = ("Pass", "Time", "", "Ops before", "Ops after", "Changed")
    rows = "".join(
        "<tr>"
        + _cell(_text(item.name), item.name)
        + _cell(format_seconds(item.seconds), _key(item.seconds), "number")
        + f'<td><div class="bar" style="width: {100 * item.seconds / longest:.1f}%">'
        "</div></td>"
        + _cell(str(item.ops_before), item.ops_before, "number")
        + _cell(str(item.ops_after), item.ops_after, "number")
        + _cell("yes" if item.changed else "no", item.changed)
        + "</tr>"
        for item in passes
    )
    head = _head(names, ("Time", "Ops before", "Ops after"))
    return (
        '<section class="card"><h2>Passes</h2><table class="sortable">'
        f"{head}<tbody>{rows}</tbody></table></section>"
    )
