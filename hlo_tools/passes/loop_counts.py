"""How often a site runs, and what loops save for its backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir

from hlo_tools.matching.hops import BARRIER, READ, WHILE, Hops, trip_count
from hlo_tools.matching.reader import (
    SHAPE_OPS,
    defining_op,
    loop_invariant,
    result_number,
)

_FOLLOWED = SHAPE_OPS | {"stablehlo.convert"}
# These run what is in them once for each time that they are run.
_ONCE = ("func.func", "sdy.manual_computation")


def _around(op: ir.Operation) -> Iterator[ir.Operation]:
    """Yields the operations around one, innermost first, up to the module."""
    parent = op.parent
    while parent is not None and parent.operation.name != "builtin.module":
        yield parent.operation
        parent = parent.operation.parent


def executions(op: ir.Operation) -> int | None:
    """Returns how often a run of the program runs `op`; None if that is not known."""
    count = 1
    for outer in _around(op):
        if outer.name == WHILE:
            trip = trip_count(outer)
            if trip is None:
                return None
            count *= trip[1]
        elif outer.name not in _ONCE:  # a branch
            return None
        elif outer.name == "func.func" and "sym_visibility" in outer.attributes:
            if ir.StringAttr(outer.attributes["sym_visibility"]).value != "public":
                return None  # it may be called anywhere
    return count


def nbytes(kind: ir.Type) -> int:
    """Returns the size of a tensor type of whole bytes."""
    tensor = ir.RankedTensorType(kind)
    return math.prod(tensor.shape) * tensor.element_type.width // 8


def stacked_bytes(backward: ir.Operation, hops: Hops, score_count: int) -> int:
    """Returns what loops save for a backward pass, for all iterations but one.

    Args:
      backward: the composite.
      hops: knows the loops.
      score_count: elements of the scores; smaller arrays are not counted, because
        operands stay saved whatever becomes of the site.
    """
    around = [loop.results[0] for loop in _around(backward) if len(loop.results)]
    found: dict[Any, int] = {}
    for operand in backward.operands:
        read = _read_of(operand)
        stack = None if read is None else hops.read_stack(read)
        if stack is None:
            continue
        loop, number = stack[0].loop, stack[0].number
        kind = ir.RankedTensorType(stack[0].update.type)  # type: ignore[attr-defined]
        is_float = isinstance(kind.element_type, ir.FloatType)
        if not is_float or math.prod(kind.shape) < score_count:
            continue
        trips = [
            (hops.trip(outer) or (0, 1))[1]
            for outer in _around(stack[0].write)
            if outer.name == WHILE and outer.results[0] not in around
        ]
        found[loop.results[0], number] = nbytes(kind) * (math.prod(trips) - 1)
    return sum(found.values())


def _read_of(value) -> ir.Operation | None:
    """Returns the read of a stack that a value is, its form and type aside."""
    while (op := defining_op(value)) is not None:
        name = op.operation.name
        if name == READ:
            return op
        if name == BARRIER:
            value = loop_invariant(op.operands[result_number(value)])
        elif name in _FOLLOWED:
            value = loop_invariant(op.operands[0])
        else:
            return None
    return None


def added_bytes(loops: Sequence[ir.Operation], before: Sequence[int]) -> int:
    """Returns the size of the values that loops carry now and did not before.

    Args:
      loops: each inside of the one before it.
      before: how many values each of them carried.
    """
    total, times = 0, 1
    for loop, count in zip(loops, before, strict=True):
        total += times * sum(nbytes(r.type) for r in list(loop.results)[count:])
        times *= (trip_count(loop) or (0, 1))[1]
    return total
