"""hoist-loop-invariants: computes once, before a loop, what each iteration computes.

Only operations without effects that can not fail move, so it does no harm if the loop
never runs. A result that moves is alive during the whole loop: `limit-mib` bounds
what all results of one loop may take together, and one that is larger than what it
is made of (a broadcast) stays inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.extend.mlir import ir

from hlo_tools import loops
from hlo_tools.passes.regions import is_within, operations
from hlo_tools.rewriting import ELEMENTWISE, is_plain, shape_of, walk

_MIB = 1 << 20
# Below this a result may be larger than its operands.
_SMALL = 1 << 10
# Cheap to make anew: moved only along with an operation that needs them.
_CHEAP = frozenset(
    f"stablehlo.{name}" for name in "constant iota reshape broadcast_in_dim".split()
)
_MOVED = (ELEMENTWISE | _CHEAP) | {
    f"stablehlo.{name}"
    for name in "concatenate convolution dot_general dynamic_slice gather pad reduce "
    "reverse slice transpose".split()
}


def _nbytes(value: ir.Value) -> float:
    shape = shape_of(value)
    if shape is None:
        return math.inf
    kind = value.type.element_type
    width = 128 if isinstance(kind, ir.ComplexType) else kind.width
    return math.prod(shape) * max(width, 8) / 8


def _may_move(op: ir.Operation) -> bool:
    if op.name not in _MOVED or not loops.is_pure(op):
        return False
    if op.name == "stablehlo.convolution":
        return not any("." in name for name in op.attributes.keys())
    return is_plain(op)


def _widens(op: ir.Operation) -> bool:
    made = sum(_nbytes(result) for result in op.results)
    return made > max(_SMALL, sum(_nbytes(value) for value in op.operands))


def _invariant(loop: ir.Operation, block: ir.Block) -> list[ir.Operation]:
    """Returns the operations that only depend on the outside and on each other."""
    found, made = [], set()
    for op in operations(block)[:-1]:
        values = loops.reads(op) if len(op.regions) else list(op.operands)
        inner = {r for region in op.regions for r in _inside(region)}
        if _may_move(op) and all(
            value in made or value in inner or not is_within(value, loop)
            for value in values
        ):
            found.append(op)
            made.update(op.results)
    return found


def _inside(region: ir.Region):
    for block in region.blocks:
        yield from block.arguments
        for op in block.operations:
            yield from op.operation.results


def _wanted(found: list[ir.Operation], budget: float) -> list[ir.Operation]:
    """Returns those worth it, and what they need, in order."""
    by_result = {result: op for op in found for result in op.results}
    chosen: dict[Any, ir.Operation] = {}
    for op in found:
        if op.name in _CHEAP or _widens(op):
            continue
        size = sum(_nbytes(result) for result in op.results)
        if size > budget:
            continue
        budget -= size
        pending = [op]
        while pending:
            one = pending.pop()
            if one.results[0] in chosen:
                continue
            chosen[one.results[0]] = one
            reads = loops.reads(one)
            pending += [by_result[value] for value in reads if value in by_result]
    return [op for op in found if op.results[0] in chosen]


def hoist(loop: ir.Operation, budget: float) -> bool:
    """Moves invariant operations in front of a loop; returns whether it did."""
    moved = False
    for region in loop.regions:
        block = region.blocks[0]
        for op in _wanted(_invariant(loop, block), budget):
            op.move_before(loop)
            moved = True
            budget -= sum(_nbytes(result) for result in op.results)
    return moved


@dataclass(frozen=True)
class HoistLoopInvariants:
    """Moves what does not change out of while loops.

    Options:
      limit_mib: what the results moved out of one loop may take, in MiB.
    """

    name: ClassVar[str] = "hoist-loop-invariants"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "compute before a loop what is the same in each iteration"
    stands_alone: ClassVar[bool] = True

    limit_mib: int = 64

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        changed = False
        for loop in reversed(walk(module.module.operation, (loops.WHILE,))):
            changed |= hoist(loop, self.limit_mib * _MIB)
        return changed
