"""Merges chains of reshapes and broadcasts into one operation each.

These operations only place elements, so every rewrite is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.extend.mlir import ir

from hlo_tools.rewriting import (
    Match,
    element_type,
    int_list,
    is_identity,
    is_plain,
    producer,
    rewrite,
    shape_of,
    splat_attribute,
)

_BROADCAST = "stablehlo.broadcast_in_dim"
_RESHAPE = "stablehlo.reshape"
_LOST = "the operation has attributes that would be lost"


def unit_map(old: Sequence[int], new: Sequence[int]) -> dict[int, int] | None:
    """Maps dims of `old` that are not 1 to dims of `new`.

    None if the shapes differ in more than dims of size 1.
    """
    before = [d for d, extent in enumerate(old) if extent != 1]
    after = [d for d, extent in enumerate(new) if extent != 1]
    if [old[d] for d in before] != [new[d] for d in after]:
        return None
    return dict(zip(before, after, strict=True))


def place_dims(fixed: Sequence[int | None], rank: int) -> list[int] | None:
    """Completes increasing dims: each None gets a free dim in its gap.

    Args:
      fixed: increasing dims of the result, or None where any will do.
      rank: the rank of the result.

    Returns:
      The dims, or None if a gap is too small.
    """
    placed: list[int] = []
    lowest = 0
    for number, dim in enumerate(fixed):
        if dim is None:
            dim = lowest
        if dim < lowest or dim >= rank - (len(fixed) - 1 - number):
            return None
        placed.append(dim)
        lowest = dim + 1
    return placed


def _is_increasing(dims: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(dims))


def collapse(op: ir.Operation) -> Match | str | None:
    """Merges a reshape or broadcast with what it is applied to."""
    source, result = op.operands[0], op.results[0]
    above = producer(source)
    rules = () if above is None else _RULES.get((op.name, above.name), ())
    identity = source.type == result.type and (
        op.name == _RESHAPE or is_identity(int_list(op, "broadcast_dimensions"))
    )
    if not rules and not identity:
        return None
    if shape_of(result) is None or shape_of(source) is None:
        return "dynamic or quantized shape"
    if not is_plain(op):
        return _LOST
    if identity:
        return Match(op, lambda rewriter: source)
    if above is None or not is_plain(above):
        return _LOST
    reason = None
    for rule in rules:
        reason = rule(op, above)
        if isinstance(reason, Match):
            break
    return reason


def _splat(op: ir.Operation, above: ir.Operation) -> Match | None:
    """Makes a splat constant in its final shape."""
    result = op.results[0]
    number = splat_attribute(op.operands[0])
    if number is None:
        return None
    shape, element = result.type.shape, element_type(result)
    return Match(op, lambda rewriter: rewriter.splat(number, shape, element))


def _iota(op: ir.Operation, above: ir.Operation) -> Match | None:
    """Makes an iota in its final shape."""
    dim = above.attributes["iota_dimension"].value
    old, new = op.operands[0].type.shape, op.results[0].type.shape
    if op.name == _RESHAPE:
        where = (unit_map(old, new) or {}).get(dim)
    else:
        where = int_list(op, "broadcast_dimensions")[dim]
    if where is None or new[where] != old[dim]:
        return None
    element = element_type(op.results[0])
    return Match(op, lambda rewriter: rewriter.iota(new, element, where))


def _reshape_twice(op: ir.Operation, above: ir.Operation) -> Match | str | None:
    """Merges reshape(reshape(x)), also where the inner one is a broadcast to 1s."""
    source, result = above.operands[0], op.results[0]
    if shape_of(source) is None:
        return "dynamic or quantized shape"
    if above.name == _BROADCAST:
        if not _is_increasing(int_list(above, "broadcast_dimensions")):
            return "the broadcast transposes"
        if math.prod(source.type.shape) != math.prod(result.type.shape):
            return None
    if source.type == result.type:
        return Match(op, lambda rewriter: source)
    return Match(op, lambda rewriter: rewriter.reshape(source, result.type.shape))


def _reshape_of_broadcast(op: ir.Operation, above: ir.Operation) -> Match | str | None:
    """Broadcasts straight to the reshaped form, where that only moves 1s."""
    source = above.operands[0]
    extents, shape = shape_of(source), op.results[0].type.shape
    if extents is None:
        return "dynamic or quantized shape"
    dims = int_list(above, "broadcast_dimensions")
    if not dims:
        return Match(op, lambda rewriter: rewriter.broadcast(source, shape, []))
    moved = unit_map(op.operands[0].type.shape, shape)
    if moved is None:
        return "the reshape splits or merges dimensions"
    return _placed(op, source, [moved.get(d) for d in dims], extents)


def _placed(
    op: ir.Operation,
    source: ir.Value,
    where: Sequence[int | None],
    extents: Sequence[int],
) -> Match | str:
    """Broadcasts `source`, its dims of size 1 going wherever there is room."""
    shape = op.results[0].type.shape
    dims = place_dims(where, len(shape))
    if dims is None:
        fixed = [None if e == 1 else d for e, d in zip(extents, where, strict=True)]
        dims = place_dims(fixed, len(shape))
    if dims is None:
        return "no room for the dimensions of size 1"
    return Match(op, lambda rewriter: rewriter.broadcast(source, shape, dims))


def _broadcast_twice(op: ir.Operation, above: ir.Operation) -> Match | str | None:
    """Merges broadcast(broadcast(x))."""
    source, shape = above.operands[0], op.results[0].type.shape
    if shape_of(source) is None:
        return "dynamic or quantized shape"
    outer = int_list(op, "broadcast_dimensions")
    dims = [outer[d] for d in int_list(above, "broadcast_dimensions")]
    return Match(op, lambda rewriter: rewriter.broadcast(source, shape, dims))


def _broadcast_of_reshape(op: ir.Operation, above: ir.Operation) -> Match | str | None:
    """Broadcasts what was there before a reshape that only moved 1s."""
    source = above.operands[0]
    extents = shape_of(source)
    if extents is None:
        return "dynamic or quantized shape"
    moved = unit_map(extents, op.operands[0].type.shape)
    outer = int_list(op, "broadcast_dimensions")
    if moved is None or not _is_increasing(outer):
        return "the reshape splits or merges dimensions"
    where = [outer[moved[d]] if d in moved else None for d in range(len(extents))]
    return _placed(op, source, where, extents)


# (name, name of what it is applied to) -> rules; the first that matches is applied.
_RULES = {
    (_RESHAPE, "stablehlo.constant"): (_splat,),
    (_RESHAPE, "stablehlo.iota"): (_iota,),
    (_RESHAPE, _RESHAPE): (_reshape_twice,),
    (_RESHAPE, _BROADCAST): (_reshape_twice, _reshape_of_broadcast),
    (_BROADCAST, "stablehlo.constant"): (_splat,),
    (_BROADCAST, "stablehlo.iota"): (_iota,),
    (_BROADCAST, _BROADCAST): (_broadcast_twice,),
    (_BROADCAST, _RESHAPE): (_broadcast_of_reshape,),
}
PATTERNS = {_RESHAPE: (collapse,), _BROADCAST: (collapse,)}


@dataclass(frozen=True)
class CollapseShapes:
    """Merges chains of reshapes and broadcasts."""

    name: ClassVar[str] = "collapse-shapes"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "merge chains of reshapes and broadcasts"

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed.

        A partitioned program is left as it is: its shapes decide which arrays XLA
        moves between devices.
        """
        if module.partitions > 1:
            return False
        return rewrite(module.module.operation, PATTERNS) > 0
