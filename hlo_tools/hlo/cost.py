"""`analyze`: what a module costs, instruction by instruction and in all.

FLOPs follow XLA's conventions (`cost_rules`), so that `total_once` can be held against
`compiled.cost_analysis()`; loops there count one trip. `total` counts every trip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from hlo_tools.errors import HloToolsError
from hlo_tools.hlo.cost_bytes import bytes_of
from hlo_tools.hlo.cost_rules import Work, work_of
from hlo_tools.hlo.ir import HloComputation, HloInstruction, HloModule
from hlo_tools.hlo.trip_counts import trip_count
from hlo_tools.targets import Target

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_DTYPES = {
    "bf16": "bfloat16", "f16": "float16", "f32": "tf32", "f64": "float64",
    "s8": "int8", "u8": "int8",
}  # fmt: skip


@dataclass(frozen=True)
class InstructionCost:
    """One instruction that runs by itself; what is fused into it is counted in it.

    Attributes:
        name, opcode, computation: of the instruction.
        source: the user's line, or "".
        trips: how often it runs; loops of unknown trip count count as one.
        flops, transcendentals, bytes: of one run.
        seconds: of one run on the target: the longer of moving its bytes and of its
            matrix products at peak. None without a target.
    """

    name: str
    opcode: str
    computation: str
    source: str
    trips: int
    flops: float
    transcendentals: float
    bytes: int
    seconds: float | None = None

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        name, opcode: of the instruction.
        bytes: of its operands, in one run.
        group_count, group_size: of its replica groups; 0 where all are one group of a
            number that the module does not say.
        trips: how often it runs.
    """

    name: str
    opcode: str
    bytes: int
    group_count: int
    group_size: int
    trips: int


@dataclass(frozen=True)
class Total:
    """Sums over instructions; None is not counted."""

    flops: float = 0.0
    transcendentals: float = 0.0
    bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class ModuleCost:
    """What a module costs.

    Attributes:
        module: its name.
        target: row of the device, or None.
        total: each loop all its trips.
        total_once: each loop one trip, and a conditional the most of its branches, as
            XLA counts.
        instructions: in program order.
        collectives: those among them.
        loops: name -> trip count, None where it can not be told.
    """

    module: str
    target: str | None
    total: Total
    total_once: Total
    instructions: tuple[InstructionCost, ...]
    collectives: tuple[Collective, ...]
    loops: dict[str, int | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"schema": 1, **asdict(self)}


def analyze(module: HloModule, target: Target | None = None) -> ModuleCost:
    """Counts operations and bytes of a module.

    Args:
        module: HLO, before or after optimization.
        target: the device to predict times for.

    Raises:
        HloToolsError: the module has no ENTRY, so what runs is not known.
    """
    if module.entry is None:
        raise HloToolsError(
            f"{module.filename or module.name}: no ENTRY computation; the text was cut"
        )
    counter = _Counter(target)
    rows, loops, collectives = [], {}, []
    for instruction, trips in counter.executed(module.entry, 1, loops):
        rows.append(counter.row(instruction, trips))
        if _kind(instruction) is not None:
            collectives.append(_collective(instruction, trips))
    once = counter.inside(module.entry)
    return ModuleCost(
        module.name,
        target.spec.name if target else None,
        _sum(rows, target),
        Total(once.flops, once.transcendentals),
        tuple(rows),
        tuple(collectives),
        loops,
    )


def _sum(rows: list[InstructionCost], target: Target | None) -> Total:
    return Total(
        sum(row.flops * row.trips for row in rows),
        sum(row.transcendentals * row.trips for row in rows),
        sum(row.bytes * row.trips for row in rows),
        sum((row.seconds or 0.0) * row.trips for row in rows) if target else None,
    )


class _Counter:
    """Counts, each computation once."""

    def __init__(self, target: Target | None):
        self.target = target
        self._work: dict[str, Work] = {}
        self._products: dict[str, float] = {}

    def inside(self, computation: HloComputation) -> Work:
        if computation.name not in self._work:
            total = Work()
            for instruction in computation:
                total += work_of(instruction, self.inside)
            self._work[computation.name] = total
        return self._work[computation.name]

    def executed(
        self, computation: HloComputation, trips: int, loops: dict[str, int | None]
    ) -> Iterator[tuple[HloInstruction, int]]:
        """(instruction, runs) of all that runs by itself, in order."""
        for instruction in computation:
            if instruction.opcode == "while":
                count = loops[instruction.name] = trip_count(instruction)
                for inner in instruction.called:
                    yield from self.executed(
                        inner, trips * (1 if count is None else count), loops
                    )
            elif instruction.opcode in ("call", "conditional", "async-start"):
                for inner in instruction.called:
                    yield from self.executed(inner, trips, loops)
            else:
                yield instruction, trips

    def row(self, instruction: HloInstruction, trips: int) -> InstructionCost:
        work, size = work_of(instruction, self.inside), bytes_of(instruction)
        seconds = None
        if self.target is not None:
            spec = self.target.spec
            seconds = max(
                size / spec.memory_bandwidth, self._product_seconds(instruction)
            )
        source = instruction.source
        return InstructionCost(
            instruction.name,
            instruction.opcode,
            instruction.computation.name if instruction.computation else "",
            str(source) if source else "",
            trips,
            work.flops,
            work.transcendentals,
            size,
            seconds,
        )

    def _product_seconds(self, instruction: HloInstruction) -> float:
        """Of the matrix products in an instruction, at the target's peak."""
        assert self.target is not None
        if instruction.opcode == "fusion":
            return sum(self._inner_seconds(inner) for inner in instruction.called)
        if instruction.opcode not in ("dot", "convolution"):
            return 0.0
        rates = self.target.spec.matmul_flops
        dtype = _DTYPES.get(instruction.operands[0].shape.element_type, "float32")
        rate = rates.get(dtype) or rates["float32"]
        return work_of(instruction, self.inside).flops / rate

    def _inner_seconds(self, computation: HloComputation) -> float:
        if computation.name not in self._products:
            self._products[computation.name] = sum(
                self._product_seconds(instruction) for instruction in computation
            )
        return self._products[computation.name]


def _kind(instruction: HloInstruction) -> str | None:
    name = instruction.opcode.removesuffix("-start")
    return name if name in COLLECTIVES else None


def _collective(instruction: HloInstruction, trips: int) -> Collective:
    groups = instruction.replica_groups
    if instruction.opcode.startswith("collective-permute"):
        pairs = instruction.attributes.get("source_target_pairs", "")
        count, size = pairs.count("},{") + 1 if pairs.strip("{}") else 0, 2
    elif groups:
        count, size = len(groups), max(map(len, groups))
    else:
        module = instruction.computation.module if instruction.computation else None
        everyone = module.num_partitions * module.replica_count if module else 0
        count, size = 1, everyone if everyone > 1 else 0
    sizes = sum(operand.shape.byte_size for operand in instruction.operands)
    return Collective(
        instruction.name, _kind(instruction) or "", sizes, count, size, trips
    )
