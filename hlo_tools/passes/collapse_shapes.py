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


def _blocked(*ops: ir.Operation) -> str | None:
    """Returns why operations must stay as they are, or None."""
    for op in ops:
        if not is_plain(op):
            return f"{op.name} has attributes that would be lost"
        if any(shape_of(value) is None for value in (*op.operands, *op.results)):
            return "dynamic or quantized shape"
    return None


def drop_identity(op: ir.Operation) -> Match | str | None:
    """Drops a reshape or broadcast that changes nothing."""
    source = op.operands[0]
    if source.type != op.results[0].type:
        return None
    if op.name == _BROADCAST and not is_identity(int_list(op, "broadcast_dimensions")):
        return None
    return _blocked(op) or Match(op, lambda rewriter: source)


def fold_source(op: ir.Operation) -> Match | str | None:
    """Makes a splat constant or an iota in its final shape."""
    above = producer(op.operands[0])
    if above is None:
        return None
    result = op.results[0]
    if above.name == "stablehlo.constant":
        number = splat_attribute(op.operands[0])
        if number is None:
            return None
        return _blocked(op) or Match(
            op,
            lambda rw: rw.splat(number, result.type.shape, element_type(result)),
        )
    if above.name != "stablehlo.iota":
        return None
    if reason := _blocked(op, above):
        return reason
    dim = _iota_dim(op, above.attributes["iota_dimension"].value)
    if dim is None:
        return None
    return Match(op, lambda rw: rw.iota(result.type.shape, element_type(result), dim))


def _iota_dim(op: ir.Operation, dim: int) -> int | None:
    """Returns where an iota's dim goes, or None if the result is no iota."""
    old, new = op.operands[0].type.shape, op.results[0].type.shape
    if op.name == _RESHAPE:
        return (unit_map(old, new) or {}).get(dim)
    where = int_list(op, "broadcast_dimensions")[dim]
    return where if new[where] == old[dim] else None


def merge_reshapes(op: ir.Operation) -> Match | str | None:
    """Merges reshape(reshape(x)), also where the inner one is a broadcast to 1s."""
    above = producer(op.operands[0])
    if above is None or above.name not in (_RESHAPE, _BROADCAST):
        return None
    if reason := _blocked(op, above):
        return reason
    source = above.operands[0]
    if above.name == _BROADCAST:
        if not _is_increasing(int_list(above, "broadcast_dimensions")):
            return "the broadcast transposes"
        if math.prod(source.type.shape) != math.prod(above.results[0].type.shape):
            return None
    shape = op.results[0].type.shape
    if source.type == op.results[0].type:
        return Match(op, lambda rewriter: source)
    return Match(op, lambda rewriter: rewriter.reshape(source, shape))


def reshape_of_broadcast(op: ir.Operation) -> Match | str | None:
    """Broadcasts straight to the reshaped form, where that only moves 1s."""
    above = producer(op.operands[0], _BROADCAST)
    if above is None:
        return None
    if reason := _blocked(op, above):
        return reason
    source = above.operands[0]
    shape = op.results[0].type.shape
    dims = int_list(above, "broadcast_dimensions")
    if not dims:
        return Match(op, lambda rewriter: rewriter.broadcast(source, shape, []))
    moved = unit_map(op.operands[0].type.shape, shape)
    if moved is None:
        return "the reshape splits or merges dimensions"
    extents = source.type.shape
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


def merge_broadcasts(op: ir.Operation) -> Match | str | None:
    """Merges broadcast(broadcast(x))."""
    above = producer(op.operands[0], _BROADCAST)
    if above is None:
        return None
    if reason := _blocked(op, above):
        return reason
    outer = int_list(op, "broadcast_dimensions")
    dims = [outer[d] for d in int_list(above, "broadcast_dimensions")]
    source, shape = above.operands[0], op.results[0].type.shape
    return Match(op, lambda rewriter: rewriter.broadcast(source, shape, dims))


def broadcast_of_reshape(op: ir.Operation) -> Match | str | None:
    """Broadcasts what was there before a reshape that only moved 1s."""
    above = producer(op.operands[0], _RESHAPE)
    if above is None:
        return None
    if reason := _blocked(op, above):
        return reason
    source = above.operands[0]
    moved = unit_map(source.type.shape, op.operands[0].type.shape)
    outer = int_list(op, "broadcast_dimensions")
    if moved is None or not _is_increasing(outer):
        return "the reshape splits or merges dimensions"
    extents = source.type.shape
    where = [outer[moved[d]] if d in moved else None for d in range(len(extents))]
    return _placed(op, source, where, extents)


PATTERNS = {
    _RESHAPE: (drop_identity, fold_source, merge_reshapes, reshape_of_broadcast),
    _BROADCAST: (drop_identity, fold_source, merge_broadcasts, broadcast_of_reshape),
}


@dataclass(frozen=True)
class CollapseShapes:
    """Merges chains of reshapes and broadcasts."""

    name: ClassVar[str] = "collapse-shapes"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "merge chains of reshapes and broadcasts"

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        return rewrite(module.module.operation, PATTERNS) > 0
