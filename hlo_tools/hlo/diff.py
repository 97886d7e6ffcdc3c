"""What differs between two modules: of meaning first, then of compilation.

Names, numbers, metadata and the order of a text are no difference.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection
from typing import Any

from hlo_tools.errors import UnknownNameError
from hlo_tools.hlo import diff_grouping as grouping_of
from hlo_tools.hlo.diff_changes import (
    PairChange,
    compare_pairs,
    follows_sizes,
    generators,
)
from hlo_tools.hlo.diff_graph import flatten
from hlo_tools.hlo.diff_grouping import Grouping, note
from hlo_tools.hlo.diff_match import NONE, Matching, match
from hlo_tools.hlo.diff_places import find_places
from hlo_tools.hlo.diff_result import (
    MINOR_PLACES,
    DiffResult,
    InstructionRef,
    Note,
    Place,
)
from hlo_tools.hlo.ir import HloModule
from hlo_tools.hlo.reading import parse

# What can be left out of a comparison.
ASPECTS = (
    "shapes",
    "types",
    "constants",
    "attributes",
    "fusions",
    "moved",
    "operand-order",
    "copies",
    "layouts",
    "sharding",
    "frontend-attributes",
    "control",
    "aliasing",
    "header",
    "schedule",
    "backend-config",
    "metadata",
)
# Told in a result's kind only where nothing before them is.
_MINOR = ("layouts", "sharding", "frontend-attributes", "control", "aliasing")
_MINOR += ("header", "schedule")
_HEADER = ("num_partitions", "replica_count", "is_scheduled")
_MOVED_SHOWN = 50


def diff(a: Any, b: Any, ignore: Collection[str] = ()) -> DiffResult:
    """Compares two modules.

    Args:
        a, b: anything that `hlo_tools.hlo.parse` takes.
        ignore: some of `ASPECTS`, not to be looked at.

    Returns:
        What differs; its `kind` is "none" if nothing does.

    Raises:
        UnknownNameError: a word in `ignore` is no aspect.
        HloToolsError: there is no module in `a` or `b`.
    """
    for aspect in ignore:
        if aspect not in ASPECTS:
            raise UnknownNameError("aspect", aspect, ASPECTS)
    modules = parse(a), parse(b)
    matching = match(flatten(modules[0]), flatten(modules[1]))
    return _Diff(modules, matching, frozenset(ignore)).result()


class _Diff:
    """One comparison, after the matching."""

    def __init__(
        self,
        modules: tuple[HloModule, HloModule],
        matching: Matching,
        ignored: frozenset[str],
    ):
        self.modules, self.matching, self.ignored = modules, matching, ignored
        self.changes = compare_pairs(matching)
        self.sizes: collections.Counter[tuple[int, int]] = collections.Counter()
        self.types: collections.Counter[tuple[str, str]] = collections.Counter()
        self.notes: list[Note] = []

    def result(self) -> DiffResult:
        global_shapes = self.shapes_are_global()
        resized, retyped, reordered, local = self.sort_changes(global_shapes)
        places = [p for p in find_places(self.matching, local) if self.counts(p)]
        grouping = Grouping(self.matching)
        major = [p for p in places if p.kind not in MINOR_PLACES]
        self.add_notes(grouping, resized, retyped, reordered, places)
        unmatched = self.unmatched_parameters()
        return DiffResult(
            self.kind(major),
            tuple(m.filename or m.name for m in self.modules),  # type: ignore[arg-type]
            tuple(sum(map(len, m.computations)) for m in self.modules),  # type: ignore[arg-type]
            tuple(places),
            tuple(self.notes),
            self.dimensions() if resized else {},
            dict(self.types.keys()) if retyped else {},
            unmatched[1],
            unmatched[0],
            tuple(
                (InstructionRef.of(x), InstructionRef.of(y))
                for x, y in grouping.moved[:_MOVED_SHOWN]
            ),
            _counterparts(grouping),
            tuple(sorted(self.ignored)),
        )

    def shapes_are_global(self) -> bool:
        """Whether other sizes and types come from the inputs, so that they are one
        difference of the whole program, or there is no other difference."""
        for i, j in self.matching.parameters:
            change = self.changes.get((i, j))
            if change is not None and (change.sizes or change.types):
                return True
        has_unmatched = NONE in self.matching.to_b or NONE in self.matching.to_a
        return not has_unmatched and not any(
            change.details for change in self.changes.values()
        )

    def sort_changes(self, global_shapes: bool) -> tuple[Any, Any, Any, Any]:
        """Pairs with other sizes, other types, other order of operands, and changes
        of their own."""
        resized, retyped, reordered = [], [], []
        local: dict[tuple[int, int], PairChange] = {}
        for change in self.changes.values():
            self.sizes.update(change.sizes)
            self.types.update(change.types)
        for (i, j), change in self.changes.items():
            pair = self.pair(i, j)
            if change.is_reordered:
                reordered.append(pair)
            details = list(change.details)
            is_resized = bool(change.sizes)
            if global_shapes:
                is_resized |= bool(change.sized_attributes) and self.near_sizes(i, j)
                kept = [
                    d
                    for d in details
                    if d.aspect != "constant"
                    or not (is_resized or follows_sizes(d, self.sizes))
                ]
                is_resized |= len(kept) < len(details)
                details = kept
                if is_resized:
                    resized.append(pair)
                if change.types:
                    retyped.append(pair)
            sized = [] if is_resized and global_shapes else change.sized_attributes
            if "constants" in self.ignored:
                details = [d for d in details if d.aspect != "constant"]
            if "attributes" in self.ignored:
                core = ("opcode", "shape", "constant", "operands")
                details, sized = [d for d in details if d.aspect in core], []
            is_local = bool(details or sized)
            if not global_shapes and "shapes" not in self.ignored:
                is_local |= bool(change.sizes)
            if not global_shapes and "types" not in self.ignored:
                is_local |= bool(change.types)
            if is_local:
                local[i, j] = self.local_change(i, j, change, details, sized)
        return resized, retyped, reordered, local

    def local_change(
        self, i: int, j: int, change: PairChange, details: list[Any], sized: list[Any]
    ) -> PairChange:
        """The change to tell; a shape that is another is told once."""
        from hlo_tools.hlo.diff_result import Detail

        if (change.sizes or change.types) and not any(
            d.aspect == "shape" for d in details
        ):
            x, y = self.pair(i, j)
            details = [*details, Detail("shape", str(x.shape), str(y.shape))]
        return dataclasses.replace(change, details=details, sized_attributes=sized)

    def near_sizes(self, i: int, j: int) -> bool:
        """Whether an operand of a pair, or the pair, has other sizes."""
        near = [(i, j)]
        nodes = self.matching.a.nodes[i], self.matching.b.nodes[j]
        near += zip(nodes[0].operands, nodes[1].operands, strict=False)
        return any(pair in self.changes and self.changes[pair].sizes for pair in near)

    def pair(self, i: int, j: int) -> tuple[Any, Any]:
        nodes = self.matching.a.nodes[i], self.matching.b.nodes[j]
        return nodes[0].instruction, nodes[1].instruction

    def counts(self, place: Place) -> bool:
        """Whether a place is of an aspect that is looked at."""
        name = {"copies": "copies", "duplicates": "fusions"}.get(place.kind, place.kind)
        return name not in self.ignored

    def add_notes(
        self,
        grouping: Grouping,
        resized: list[Any],
        retyped: list[Any],
        reordered: list[Any],
        places: list[Place],
    ) -> None:
        regrouped = grouping.regrouped()
        duplicates = [p for p in places if p.kind == "duplicates"]
        changed = [
            d for d, text in self.dimensions().items() for d in (f"{d} to {text}",)
        ]
        self.note("shapes", resized, f"sizes: {', '.join(changed[:8])}")
        types = [f"{old} to {new}" for old, new in self.types]
        self.note("types", retyped, f"element types: {', '.join(types[:8])}")
        count = len(regrouped) + sum(len(p.changes) for p in duplicates)
        if count and "fusions" not in self.ignored:
            text = "instructions in other fusions, or computed in more of them"
            found = note("fusions", regrouped, text)
            self.notes.append(dataclasses.replace(found, count=count))
        self.note("moved", grouping.relocated(), "instructions in other computations")
        swapped = grouping.reordered_calls() + reordered
        self.note("operand-order", swapped, "same operands in another order")
        copies = [p for p in places if p.kind == "copies"]
        if copies:
            count = sum(len(p.changes) for p in copies)
            self.notes.append(Note("copies", count, "copies and bitcasts"))
        self.note("layouts", grouping_of.other_layouts(grouping), "layouts of results")
        for aspect, keys in (
            ("sharding", ("sharding",)),
            ("frontend-attributes", ("frontend_attributes",)),
            ("backend-config", ("backend_config",)),
        ):
            found = grouping_of.annotated_otherwise(grouping, keys)
            self.note(aspect, found, f"instructions with another {aspect}")
        self.note(
            "control", self.other_control(grouping), "other predecessors to wait for"
        )
        count, words = grouping_of.other_aliases(self.matching)
        if count and "aliasing" not in self.ignored:
            text = f"results that take another parameter's buffer: {', '.join(words)}"
            self.notes.append(Note("aliasing", count, text))
        self.add_header_note()
        late = grouping.rescheduled()
        self.note("schedule", late, "instructions that run earlier or later")

    def note(self, aspect: str, pairs: list[Any], text: str) -> None:
        if pairs and aspect not in self.ignored:
            self.notes.append(note(aspect, pairs, text))

    def add_header_note(self) -> None:
        first, second = (m.attributes for m in self.modules)
        other = [
            f"{key} {first.get(key, 'not set')} to {second.get(key, 'not set')}"
            for key in _HEADER
            if first.get(key) != second.get(key)
        ]
        if other and "header" not in self.ignored:
            self.notes.append(Note("header", len(other), ", ".join(other)))

    def other_control(self, grouping: Grouping) -> list[Any]:
        """Matched instructions that wait for other instructions."""
        partners = {}
        pairs = list(grouping.pairs())
        for x, y in pairs:
            partners[_name(x)] = y.name
        return [
            (x, y)
            for x, y in pairs
            if ("control-predecessors" in x.attributes)
            | ("control-predecessors" in y.attributes)
            and {
                partners.get((x.computation and x.computation.name, name))
                for name in x.control_predecessors
            }
            != set(y.control_predecessors)
        ]

    def dimensions(self) -> dict[str, str]:
        """The changed sizes; of several new ones, the most frequent."""
        chosen: dict[int, int] = {}
        for (old, new), _ in self.sizes.most_common():
            chosen.setdefault(old, new)
        return generators(chosen)

    def unmatched_parameters(self) -> tuple[int, int]:
        matching = self.matching
        counts = []
        for graph, taken in ((matching.a, matching.to_b), (matching.b, matching.to_a)):
            nodes = graph.parameters.values()
            counts.append(sum(taken[index] == NONE for index in nodes))
        return counts[0], counts[1]

    def kind(self, major: list[Place]) -> str:
        """See `DiffResult.kind`."""
        noted = [n.aspect for n in self.notes]
        parts = [aspect for aspect in ("shapes", "types") if aspect in noted]
        kinds = list(dict.fromkeys(place.kind for place in major))
        parts += [kinds[0]] if len(kinds) == 1 else ["ops"] if kinds else []
        if not major:
            if "fusions" in noted or "moved" in noted:
                parts += [a for a in ("fusions", "moved") if a in noted]
            elif "operand-order" in noted:
                parts.append("operand order")
        if not parts:
            parts = [a for a in ("copies", *_MINOR) if a in noted]
        if not parts and "backend-config" in noted:
            parts = ["backend-config"]
        return " and ".join(parts) or "none"


def _name(instruction: Any) -> tuple[str | None, str]:
    computation = instruction.computation
    return (computation.name if computation else None, instruction.name)


def _counterparts(grouping: Grouping) -> dict[str, str]:
    found = {}
    for x, y in grouping.pairs():
        found["/".join(map(str, _name(x)))] = "/".join(map(str, _name(y)))
    return found
