"""A diff as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hlo_tools.hlo.diff_result import (
    MINOR_PLACES,
    Change,
    Cost,
    DiffResult,
    InstructionRef,
    Note,
    Place,
)

_SHOWN_PLACES, _SHOWN_CHANGES, _SHOWN_NAMES = 20, 6, 3
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_HEADLINES = {
    "inserted": "added",
    "removed": "removed",
    "constants": "constant changed",
    "wiring": "operands changed",
    "attributes": "attributes changed",
    "ops": "operations changed",
    "copies": "copies",
    "duplicates": "computed once more",
}


def as_text(result: DiffResult) -> str:
    """The result for a reader; ends in a newline."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: DiffResult) -> Iterator[str]:
    yield f"a: {result.names[0]} ({result.instructions[0]} instructions)"
    yield f"b: {result.names[1]} ({result.instructions[1]} instructions)"
    ignored = f" (ignored: {', '.join(result.ignored)})" if result.ignored else ""
    if result.is_same:
        yield f"same program{ignored}"
        return
    yield f"different: {summary(result)}{ignored}"
    places = [p for p in result.places if p.kind not in MINOR_PLACES]
    for number, place in enumerate(places[:_SHOWN_PLACES], 1):
        yield ""
        yield from _place_lines(number, place)
    if len(places) > _SHOWN_PLACES:
        yield f"... and {len(places) - _SHOWN_PLACES} more (--format json has all)"
    if result.notes:
        yield ""
    for note in result.notes:
        yield from _note_lines(note)


def summary(result: DiffResult) -> str:
    """The kind of the differences, and how many, in one line."""
    parts = [result.kind]
    if result.place_count:
        parts.append(count(result.place_count, "place"))
    for number, what in (
        (result.inserted_parameters, "new"),
        (result.removed_parameters, "removed"),
    ):
        if number:
            parts.append(count(number, f"{what} parameter"))
    return ", ".join(parts)


def count(number: int, noun: str) -> str:
    """ "1 place", "2 places"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def scope(op_names: Sequence[str]) -> str:
    """The path that most of the names have in common: of a layer, say."""
    known = [name for name in op_names if "/" in name] or list(op_names)
    if not known:
        return ""
    if len(known) == 1:
        return known[0]
    votes: dict[str, int] = {}
    for name in known:
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            prefix = "/".join(parts[:depth])
            votes[prefix] = votes.get(prefix, 0) + 1
    common = [prefix for prefix, n in votes.items() if 2 * n > len(known)]
    return max(common, key=len) if common else known[0]


def place_scope(place: Place) -> str:
    """Where a place is in the user's program: by its op_names on both sides."""
    both = [scope(place.op_names(side)) for side in "ab"]
    both = [text for text in both if text]
    if len(both) == 2:
        pairs = zip(*(text.split("/") for text in both), strict=False)
        shared = [x for x, _ in itertools.takewhile(lambda p: p[0] == p[1], pairs)]
        return "/".join(shared) or both[1]
    return both[0] if both else ""


def headline(place: Place) -> str:
    """What changed at a place, and where, in a few words."""
    return f"{_HEADLINES[place.kind]}: {place_scope(place) or '(no op_name)'}"


def _place_lines(number: int, place: Place) -> Iterator[str]:
    sources = dict.fromkeys([*place.sources("a"), *place.sources("b")])
    at = f" at {', '.join(list(sources)[:_SHOWN_NAMES])}" if sources else ""
    yield f"{number}. {headline(place)}{at}"
    for sign, kind in (("-", "removed"), ("+", "added")):
        refs = [change.a or change.b for change in place.changes if change.kind == kind]
        yield from _group_lines(sign, [ref for ref in refs if ref is not None])
    changed = [change for change in place.changes if change.kind == "changed"]
    for change in changed[:_SHOWN_CHANGES]:
        yield from _change_lines(change)
    if len(changed) > _SHOWN_CHANGES:
        yield f"   ~ ... {len(changed) - _SHOWN_CHANGES} more"
    if costs := _cost_text(place.cost_a, place.cost_b):
        yield f"   {costs}"
    if place.repeats:
        names = [place_scope(other) for other in place.repeats]
        names = list(dict.fromkeys(name for name in names if name))
        shown = f": {', '.join(names[:_SHOWN_NAMES])}" if names else ""
        more = ", ..." if len(names) > _SHOWN_NAMES else ""
        places = count(len(place.repeats), "more place")
        yield f"   same change in {places}{shown}{more}"


def _group_lines(sign: str, refs: list[InstructionRef]) -> Iterator[str]:
    if not refs:
        return
    counts: dict[str, int] = {}
    for ref in refs:
        counts[ref.opcode] = counts.get(ref.opcode, 0) + 1
    what = ", ".join(f"{op} x{n}" if n > 1 else op for op, n in counts.items())
    first = next(
        (r for r in refs if r.opcode not in ("constant", "broadcast")), refs[0]
    )
    yield f"   {sign} {count(len(refs), 'instruction')}: {what}"
    yield f"     first {_ref_text(first)}"


def _ref_text(ref: InstructionRef) -> str:
    line = f", line {ref.line}" if ref.line else ""
    return f"%{ref.name} = {ref.shape} {ref.opcode} in {ref.computation}{line}"


def _change_lines(change: Change) -> Iterator[str]:
    if change.a is None or change.b is None:
        return
    names = change.a.name, change.b.name
    name = f"%{names[0]}" if names[0] == names[1] else f"%{names[0]} / %{names[1]}"
    details = "; ".join(
        f"{d.aspect} {d.before or '(none)'} -> {d.after or '(none)'}"
        for d in change.details
    )
    yield f"   ~ {change.a.opcode} {name}: {details}"


def _cost_text(a: Cost, b: Cost) -> str:
    parts = []
    if a.bytes or b.bytes:
        parts.append(f"results {byte_text(a.bytes)} -> {byte_text(b.bytes)}")
    if a.flops is not None and b.flops is not None:
        parts.append(f"{a.flops:.3g} -> {b.flops:.3g} FLOPs")
    if a.seconds is not None and b.seconds is not None:
        parts.append(f"{a.seconds * 1e6:.3g} -> {b.seconds * 1e6:.3g} us")
    return ", ".join(parts)


def byte_text(size: float) -> str:
    """A number of bytes in a unit that fits."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def _note_lines(note: Note) -> Iterator[str]:
    yield f"{note.aspect}: {note.count} ({note.text})"
    if note.examples and note.aspect not in ("shapes", "types", "backend-config"):
        x, y = note.examples[0]
        name = x.name if x.name == y.name else f"{x.name} / {y.name}"
        yield f"   such as %{name} {x.shape} {x.opcode} {x.op_name}".rstrip()
