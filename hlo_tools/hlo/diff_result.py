"""What a diff finds, as data."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hlo_tools.hlo.ir import HloInstruction

SCHEMA = "hlo-tools-diff/1"


@dataclass(frozen=True, slots=True)
class InstructionRef:
    """An instruction, for a reader.

    Attributes:
        name, computation: where it is in its module.
        opcode, shape: as HLO spells them.
        op_name: path of names in the user's program, or "".
        source: "file:line" of the user's program, or "".
        bytes: size of its result.
        line: of the module's text.
    """

    name: str
    computation: str
    opcode: str
    shape: str
    op_name: str
    source: str
    bytes: int
    line: int

    @classmethod
    def of(cls, instruction: HloInstruction, op_name: str = "") -> InstructionRef:
        source = instruction.source
        computation = instruction.computation
        return cls(
            instruction.name,
            computation.name if computation else "",
            instruction.opcode,
            str(instruction.shape),
            op_name or instruction.op_name,
            "" if source is None else str(source),
            instruction.shape.byte_size,
            instruction.line,
        )


@dataclass(frozen=True, slots=True)
class Detail:
    """One respect in which an instruction changed.

    Attributes:
        aspect: "opcode", "shape", "constant", "operands", "calls", or an attribute.
        before, after: in the two modules.
    """

    aspect: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Change:
    """An instruction that was added, removed or changed.

    Attributes:
        a, b: the instruction in the two modules; one is None where it was added or
            removed.
        details: in what respects it changed.
    """

    a: InstructionRef | None
    b: InstructionRef | None
    details: tuple[Detail, ...] = ()

    @property
    def kind(self) -> str:
        """ "added", "removed" or "changed"."""
        if self.a is None:
            return "added"
        return "removed" if self.b is None else "changed"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a set of instructions costs; None is not known.

    Attributes:
        bytes: of their results.
        flops: floating-point operations.
        seconds: of the roofline of the target that was named.
    """

    bytes: int = 0
    flops: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Changed instructions that hang together.

    Attributes:
        kind: "inserted", "removed", "constants", "wiring", "attributes" where that is
            all there is to it, else "ops"; "copies" and "duplicates" for what moves or
            repeats values only.
        changes: in the order of the modules.
        repeats: other places with the same change.
        cost_a, cost_b: of the instructions in it.
        signature: equal for the same change at another place.
    """

    kind: str
    changes: tuple[Change, ...]
    repeats: tuple[Place, ...] = ()
    cost_a: Cost = Cost()
    cost_b: Cost = Cost()
    signature: str = ""

    def instructions(self, side: str) -> list[InstructionRef]:
        """Those of module "a" or "b"."""
        found = (getattr(change, side) for change in self.changes)
        return [ref for ref in found if ref is not None]

    def op_names(self, side: str) -> tuple[str, ...]:
        """Distinct op_names of the changed instructions of a module, in order."""
        return _distinct(ref.op_name for ref in self.instructions(side))

    def sources(self, side: str) -> tuple[str, ...]:
        """Distinct source lines of the changed instructions of a module, in order."""
        return _distinct(ref.source for ref in self.instructions(side))

    def opcodes(self, side: str) -> dict[str, int]:
        """How many of each opcode are changed, the most frequent first."""
        counts = collections.Counter(ref.opcode for ref in self.instructions(side))
        return dict(counts.most_common())

    @property
    def replaced(self) -> dict[str, str]:
        """Opcodes that took the place of others, old to new."""
        return {
            detail.before: detail.after
            for change in self.changes
            for detail in change.details
            if detail.aspect == "opcode"
        }


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))


@dataclass(frozen=True, slots=True)
class Note:
    """Something else that differs, all over the module.

    Attributes:
        aspect: one of `ASPECTS`.
        count: of instructions.
        text: in a few words.
        examples: of the instructions, (a, b).
    """

    aspect: str
    count: int
    text: str
    examples: tuple[tuple[InstructionRef, InstructionRef], ...] = ()


@dataclass(frozen=True)
class DiffResult:
    """What differs between modules a and b.

    Attributes:
        kind: "none", or what the differences are: "ops", "inserted", "removed",
            "constants", "wiring", "attributes", "shapes", "types", "fusions",
            "operand order", "layouts", "schedule", ..., joined by " and ".
        names: of the modules.
        instructions: of the modules, how many.
        places: where instructions were changed, repeats collapsed.
        notes: differences that are no places.
        dimensions: sizes that changed, old to new, without multiples of others.
        types: element types that changed, old to new.
        inserted_parameters, removed_parameters: of the entry.
        moved: instructions that are in another computation, (a, b).
        counterparts: names of matched instructions, "computation/instruction" of a to
            that of b.
        ignored: aspects that were not looked at.
    """

    kind: str
    names: tuple[str, str] = ("", "")
    instructions: tuple[int, int] = (0, 0)
    places: tuple[Place, ...] = ()
    notes: tuple[Note, ...] = ()
    dimensions: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    inserted_parameters: int = 0
    removed_parameters: int = 0
    moved: tuple[tuple[InstructionRef, InstructionRef], ...] = ()
    counterparts: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        return self.kind == "none"

    @property
    def place_count(self) -> int:
        """Places, repeats counted; those of copies and duplicates are not."""
        return sum(
            1 + len(p.repeats) for p in self.places if p.kind not in MINOR_PLACES
        )

    @property
    def where(self) -> tuple[str, ...]:
        """op_names of what changed, on both sides."""
        major = [place for place in self.places if place.kind not in MINOR_PLACES]
        every = [p for place in major for p in (place, *place.repeats)]
        return _distinct(
            name for p in every for side in "ab" for name in p.op_names(side)
        )

    @property
    def replaced(self) -> dict[str, str]:
        """Opcodes that took the place of others, old to new."""
        every = [p for place in self.places for p in (place, *place.repeats)]
        return {old: new for p in every for old, new in p.replaced.items()}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values; `counterparts` are left out."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "modules": list(self.names),
            "instructions": list(self.instructions),
            "place_count": self.place_count,
            "places": [_place_dict(place) for place in self.places],
            "where": list(self.where),
            "replaced": self.replaced,
            "dimensions": self.dimensions,
            "types": self.types,
            "inserted_parameters": self.inserted_parameters,
            "removed_parameters": self.removed_parameters,
            "moved": [[_ref(a), _ref(b)] for a, b in self.moved],
            "notes": [
                {"aspect": n.aspect, "count": n.count, "text": n.text}
                for n in self.notes
            ],
            "ignored": list(self.ignored),
        }

    def text(self) -> str:
        """The differences for a reader."""
        from hlo_tools.hlo.diff_text import as_text

        return as_text(self)


# Places that change nothing that is computed.
MINOR_PLACES = ("copies", "duplicates")


def _ref(ref: InstructionRef | None) -> dict[str, Any] | None:
    return None if ref is None else dataclasses.asdict(ref)


def _place_dict(place: Place) -> dict[str, Any]:
    return {
        "kind": place.kind,
        "op_names": {side: list(place.op_names(side)) for side in "ab"},
        "sources": {side: list(place.sources(side)) for side in "ab"},
        "opcodes": {side: place.opcodes(side) for side in "ab"},
        "replaced": place.replaced,
        "cost": {
            "a": dataclasses.asdict(place.cost_a),
            "b": dataclasses.asdict(place.cost_b),
        },
        "changes": [
            {
                "kind": change.kind,
                "a": _ref(change.a),
                "b": _ref(change.b),
                "details": [dataclasses.asdict(d) for d in change.details],
            }
            for change in place.changes
        ],
        "repeats": [
            {side: list(other.op_names(side)) for side in "ab"}
            for other in place.repeats
        ],
    }
