"""HLO as data: a module of computations of instructions.

Instructions keep their attributes as text, in `attributes`; what an attribute means is
read when it is asked for. So nothing that a newer XLA writes is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hlo_tools.hlo import attributes as read
from hlo_tools.hlo.attributes import Metadata, Sharding
from hlo_tools.hlo.header import Alias, parse_aliases, parse_entry_layout
from hlo_tools.hlo.shapes import UNKNOWN_SHAPE, Shape
from hlo_tools.hlo.stack import SourceFrame, StackTables

# Attributes that name computations.
CALLERS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
    "select",
    "scatter",
)
UNDEFINED = "undefined"  # opcode of an operand that the text does not define


class Unparsed(NamedTuple):
    """Text that was not understood, kept as it is."""

    line: int
    text: str
    reason: str


@dataclass(slots=True, eq=False)
class HloInstruction:
    """One instruction.

    Attributes:
        name: without its "%".
        shape: of its result.
        opcode: as HLO spells it.
        operand_names: names of its operands.
        payload: what stands in the parentheses where that is no list of names: a
            constant's literal, a parameter's number.
        attributes: attributes as they are written, in order; "" for a bare word.
        is_root: whether it is its computation's result.
        line: of the text, from 1; 0 if it was not read from text.
        operands: the instructions themselves. One that the text does not define has
            the opcode `UNDEFINED`.
        users: instructions that have it as an operand, each once.
        computation: that it is in.
    """

    name: str
    shape: Shape
    opcode: str
    operand_names: tuple[str, ...] = ()
    payload: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    is_root: bool = False
    line: int = 0
    operands: tuple[HloInstruction, ...] = field(default=(), repr=False)
    users: list[HloInstruction] = field(default_factory=list, repr=False)
    computation: HloComputation | None = field(default=None, repr=False)

    def key(self) -> tuple[Any, ...]:
        """All that it says; equal for equal instructions."""
        return (
            self.name,
            self.shape,
            self.opcode,
            self.operand_names,
            self.payload,
            tuple(self.attributes.items()),
            self.is_root,
        )

    @property
    def metadata(self) -> Metadata:
        text = self.attributes.get("metadata")
        return Metadata() if text is None else Metadata.parse(text)

    @property
    def op_name(self) -> str:
        """Path of names in the user's program, or ""."""
        return self.metadata.op_name

    @property
    def sharding(self) -> Sharding | None:
        text = self.attributes.get("sharding")
        return None if text is None else Sharding.parse(text)

    @property
    def backend_config(self) -> Any:
        """The backend configuration as JSON values; None if there is none, or if it
        is no JSON. `attributes["backend_config"]` is its text."""
        return read.backend_config(self.attributes.get("backend_config", ""))

    @property
    def control_predecessors(self) -> tuple[str, ...]:
        """Names of instructions that must run before."""
        return read.names(self.attributes.get("control-predecessors", ""))

    @property
    def replica_groups(self) -> tuple[tuple[int, ...], ...] | None:
        """Groups of a collective; () is one group of all; None where it has none."""
        text = self.attributes.get("replica_groups")
        return None if text is None else read.replica_groups(text)

    @property
    def called_names(self) -> tuple[str, ...]:
        """Names of the computations it calls, in order."""
        found: list[str] = []
        for key in CALLERS:
            if key in self.attributes:
                found.extend(read.names(self.attributes[key]))
        return tuple(found)

    @property
    def called(self) -> tuple[HloComputation, ...]:
        """The computations it calls, those left out that the module lacks."""
        module = self.computation.module if self.computation else None
        if module is None:
            return ()
        known = module.computations_by_name
        return tuple(known[name] for name in self.called_names if name in known)

    @property
    def parameter_number(self) -> int | None:
        if self.opcode == "parameter" and self.payload.strip().isdigit():
            return int(self.payload)
        return None

    @property
    def frames(self) -> tuple[SourceFrame, ...]:
        """Lines of the user's program, the innermost first; () if not known."""
        metadata = self.metadata
        module = self.computation.module if self.computation else None
        if metadata.stack_frame_id and module is not None:
            found = module.stack.frames(metadata.stack_frame_id)
            if found:
                return found
        if metadata.source_file:
            return (SourceFrame(metadata.source_file, metadata.source_line),)
        return ()

    @property
    def source(self) -> SourceFrame | None:
        """The innermost line of the user's program."""
        frames = self.frames
        return frames[0] if frames else None

    @property
    def async_start(self) -> HloInstruction | None:
        """For a -done or -update instruction, the -start instruction of its pair."""
        here = self
        while here.opcode.endswith(("-done", "-update")) and here.operands:
            here = here.operands[0]
            if here.opcode.endswith("-start"):
                return here
        return None

    def __str__(self) -> str:
        from hlo_tools.hlo.printer import print_instruction

        return print_instruction(self)


@dataclass(slots=True, eq=False)
class HloComputation:
    """A computation: instructions in the order of the text.

    Attributes:
        name: without its "%".
        instructions: in order; that is the schedule in a scheduled module.
        signature: parameters and result as its header says, or "".
        attributes: of the header and after the closing brace (execution_thread).
        is_entry: whether the text says ENTRY.
        is_complete: False where the text ended inside it.
        undefined: stand-ins for operands that the text does not define.
        module: that it is in.
    """

    name: str
    instructions: list[HloInstruction] = field(default_factory=list)
    signature: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    is_entry: bool = False
    is_complete: bool = True
    undefined: dict[str, HloInstruction] = field(default_factory=dict)
    module: HloModule | None = field(default=None, repr=False)
    _by_name: dict[str, HloInstruction] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> HloInstruction:
        return self._by_name[name.removeprefix("%")]

    def __contains__(self, name: str) -> bool:
        return name.removeprefix("%") in self._by_name

    def __iter__(self) -> Iterator[HloInstruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    @property
    def root(self) -> HloInstruction | None:
        """Its result: the instruction marked ROOT, else the last one of a complete
        computation; None where the text was cut before it."""
        for instruction in reversed(self.instructions):
            if instruction.is_root:
                return instruction
        if self.is_complete and self.instructions:
            return self.instructions[-1]
        return None

    @property
    def parameters(self) -> tuple[HloInstruction, ...]:
        """Parameters by their numbers."""
        found = [i for i in self.instructions if i.parameter_number is not None]
        return tuple(sorted(found, key=lambda i: i.parameter_number or 0))

    @property
    def execution_thread(self) -> str:
        """Name of the thread it runs on; "main" unless it says another."""
        return self.attributes.get("execution_thread", '"main"').strip('"')

    def key(self) -> tuple[Any, ...]:
        """All that it says; equal for equal computations."""
        return (
            self.name,
            self.signature,
            tuple(self.attributes.items()),
            self.is_entry,
            self.is_complete,
            tuple(instruction.key() for instruction in self.instructions),
        )

    def link(self) -> None:
        """Connects instructions with their operands and users."""
        known = self._by_name = {i.name: i for i in self.instructions}
        for instruction in self.instructions:
            instruction.computation = self
            instruction.users = []
        for instruction in self.instructions:
            operands = []
            for name in instruction.operand_names:
                operand = known.get(name)
                if operand is None:
                    operand = self.undefined.get(name)
                    if operand is None:
                        operand = HloInstruction(name, UNKNOWN_SHAPE, UNDEFINED)
                        operand.computation = self
                        self.undefined[name] = operand
                operands.append(operand)
                if not operand.users or operand.users[-1] is not instruction:
                    operand.users.append(instruction)
            instruction.operands = tuple(operands)

    def __str__(self) -> str:
        from hlo_tools.hlo.printer import print_computation

        return print_computation(self)


@dataclass(slots=True, eq=False)
class HloModule:
    """A module: computations, and what the header says.

    Attributes:
        name: of the module, "" where the text has no header.
        computations: in the order of the text.
        attributes: of the header, as they are written.
        stack: tables of source lines.
        unparsed: text that was not understood.
        filename: where it was read from, or "".
    """

    name: str = ""
    computations: list[HloComputation] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    stack: StackTables = field(default_factory=StackTables)
    unparsed: list[Unparsed] = field(default_factory=list)
    filename: str = ""
    computations_by_name: dict[str, HloComputation] = field(
        default_factory=dict, repr=False
    )

    @property
    def entry(self) -> HloComputation | None:
        """The computation marked ENTRY. Text without a header need not mark one: then
        it is the last that no other calls. None where the text was cut before it."""
        for computation in reversed(self.computations):
            if computation.is_entry:
                return computation
        if self.name:
            return None
        roots = self.uncalled
        return roots[-1] if roots else None

    @property
    def uncalled(self) -> list[HloComputation]:
        """The computations that no instruction calls, in order."""
        called = {name for i in self.instructions() for name in i.called_names}
        return [c for c in self.computations if c.name not in called]

    @property
    def is_scheduled(self) -> bool:
        """Whether the order of instructions is the one they run in."""
        return self.attributes.get("is_scheduled") == "true"

    @property
    def is_complete(self) -> bool:
        """Whether all of the text was there and understood."""
        return not self.unparsed and all(c.is_complete for c in self.computations)

    @property
    def input_output_alias(self) -> tuple[Alias, ...]:
        """Results that take the buffer of a parameter."""
        return parse_aliases(self.attributes.get("input_output_alias", ""))

    @property
    def entry_layout(self) -> tuple[tuple[Shape, ...], Shape] | None:
        """Shapes with layouts of the parameters and of the result."""
        return parse_entry_layout(self.attributes.get("entry_computation_layout", ""))

    @property
    def num_partitions(self) -> int:
        return _count(self.attributes.get("num_partitions"))

    @property
    def replica_count(self) -> int:
        return _count(self.attributes.get("replica_count"))

    def instructions(self) -> Iterator[HloInstruction]:
        """All instructions, in the order of the text."""
        for computation in self.computations:
            yield from computation.instructions

    def __getitem__(self, name: str) -> HloComputation:
        return self.computations_by_name[name.removeprefix("%")]

    def __contains__(self, name: str) -> bool:
        return name.removeprefix("%") in self.computations_by_name

    def link(self) -> None:
        """Connects everything in it; call it after a change by hand."""
        self.computations_by_name = {c.name: c for c in self.computations}
        for computation in self.computations:
            computation.module = self
            computation.link()

    def key(self) -> tuple[Any, ...]:
        """All that it says; equal for equal modules, wherever they were read."""
        return (
            self.name,
            tuple(self.attributes.items()),
            self.stack,
            tuple(u.text for u in self.unparsed),
            tuple(computation.key() for computation in self.computations),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HloModule) and self.key() == other.key()

    __hash__ = object.__hash__

    def as_text(self) -> str:
        """The module as HLO text."""
        from hlo_tools.hlo.printer import print_module

        return print_module(self)

    __str__ = as_text


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 1


def async_pairs(
    instructions: Sequence[HloInstruction],
) -> list[tuple[HloInstruction, HloInstruction]]:
    """The (start, done) pairs among `instructions`, in the order of the ends."""
    return [
        (start, instruction)
        for instruction in instructions
        if instruction.opcode.endswith("-done")
        and (start := instruction.async_start) is not None
    ]
