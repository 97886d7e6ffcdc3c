"""Operations that only place elements: those that do nothing, or could be simpler.

Every rewrite is exact. Those of `PATTERNS` keep which values are sharded how;
`RESHAPING_PATTERNS` are for programs of one partition only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools.passes.constant_values import constant_of, read_constant
from hlo_tools.rewriting import (
    Match,
    Rewriter,
    element_type,
    int_list,
    is_identity,
    is_plain,
    permuted,
    producer,
    shape_of,
    single_user,
    splat_attribute,
)

_LOST = "the operation has attributes that would be lost"
_SLICE = "stablehlo.slice"


def _replaced(op: ir.Operation, value: ir.Value) -> Match | str | None:
    if value.type != op.results[0].type:
        return None
    return Match(op, lambda rewriter: value) if is_plain(op) else _LOST


def make_slice(
    rewriter: Rewriter, value: ir.Value, starts, limits, strides=None
) -> ir.Value:
    """Makes a slice."""
    strides = list(strides or [1] * len(starts))
    extents = [
        -(-(stop - start) // step)
        for start, stop, step in zip(starts, limits, strides, strict=True)
    ]
    kind = ir.RankedTensorType.get(extents, element_type(value))
    rows = {"start_indices": starts, "limit_indices": limits, "strides": strides}
    attributes = {
        name: ir.DenseI64ArrayAttr.get(list(row)) for name, row in rows.items()
    }
    return rewriter.create(_SLICE, [value], kind, attributes)


# ------------------------------------------------------------- transpose, broadcast


def transpose_of_transpose(op: ir.Operation) -> Match | str | None:
    """Drops transposes that do nothing, and merges two into one."""
    perm, source = int_list(op, "permutation"), op.operands[0]
    if is_identity(perm):
        return _replaced(op, source)
    above = producer(source, op.name)
    if above is None:
        return None
    if not (is_plain(op) and is_plain(above)):
        return _LOST
    both = permuted(int_list(above, "permutation"), perm)
    return Match(op, lambda rewriter: rewriter.transpose(above.operands[0], both))


def transpose_to_reshape(op: ir.Operation) -> Match | str | None:
    """Writes a transpose that only moves dimensions of size 1 as a reshape."""
    shape = shape_of(op.operands[0])
    if shape is None:
        return None
    moved = [d for d in int_list(op, "permutation") if shape[d] != 1]
    if moved != sorted(moved) or is_identity(int_list(op, "permutation")):
        return None
    if not is_plain(op):
        return _LOST
    return Match(op, lambda rw: rw.reshape(op.operands[0], op.results[0].type.shape))


def broadcast_to_reshape(op: ir.Operation) -> Match | str | None:
    """Writes a broadcast that repeats nothing as a reshape or a transpose."""
    source, result = op.operands[0], op.results[0]
    old, new = shape_of(source), shape_of(result)
    if old is None or new is None or math.prod(old) != math.prod(new):
        return None
    if 0 in new or source.type == result.type:
        return None
    dims = int_list(op, "broadcast_dimensions")
    if not is_plain(op):
        return _LOST
    placed = [d for d, extent in zip(dims, old, strict=True) if extent != 1]
    if placed == sorted(placed):
        return Match(op, lambda rewriter: rewriter.reshape(source, new))
    if len(old) == len(new):
        order = sorted(range(len(dims)), key=dims.__getitem__)
        return Match(op, lambda rewriter: rewriter.transpose(source, order))
    return None


# ------------------------------------------------------------- concatenate and slice


def concatenate_less(op: ir.Operation) -> Match | str | None:
    """Drops empty parts, joins equal constants, and flattens what is nested."""
    if shape_of(op.results[0]) is None:
        return None
    if len(op.operands) == 1:
        return _replaced(op, op.operands[0])
    dim = op.attributes["dimension"].value
    if any(shape_of(part) is None for part in op.operands):
        return None
    parts = [part for part in op.operands if part.type.shape[dim]]
    flat = list(itertools.chain.from_iterable(_flattened(op, part) for part in parts))
    runs = [list(run) for _, run in itertools.groupby(flat, _splat_key(flat))]
    if len(runs) == len(op.operands):
        return None
    if not parts or not is_plain(op):
        return _LOST

    def build(rewriter: Rewriter) -> ir.Value:
        made = [_joined(rewriter, run, dim) for run in runs]
        if len(made) == 1:
            return made[0]
        return rewriter.with_operands(op, made, op.results[0].type.shape)

    return Match(op, build)


def _flattened(op: ir.Operation, part: ir.Value) -> list[ir.Value]:
    inner = producer(part, op.name)
    if inner is None or single_user(part) is None or not is_plain(inner):
        return [part]
    if inner.attributes["dimension"] != op.attributes["dimension"]:
        return [part]
    return list(inner.operands)


def _splat_key(parts: list[ir.Value]) -> Callable[[ir.Value], object]:
    """Returns a key that is the same for neighbours that are the same constant."""
    counter = itertools.count()

    def key(part: ir.Value) -> object:
        number = splat_attribute(part)
        return next(counter) if number is None else str(number)

    return key


def _joined(rewriter: Rewriter, run: list[ir.Value], dim: int) -> ir.Value:
    if len(run) == 1:
        return run[0]
    shape = list(run[0].type.shape)
    shape[dim] = sum(part.type.shape[dim] for part in run)
    return rewriter.splat(splat_attribute(run[0]), shape, element_type(run[0]))


def simpler_slice(op: ir.Operation) -> Match | str | None:
    """Drops slices of everything, and merges a slice with what is above it."""
    source = op.operands[0]
    if shape_of(source) is None:
        return None
    if source.type == op.results[0].type:
        return _replaced(op, source)
    above = producer(source)
    if above is None or above.name not in (_SLICE, "stablehlo.concatenate"):
        return None
    if not (is_plain(op) and is_plain(above)):
        return _LOST
    if above.name == _SLICE:
        return _slice_of_slice(op, above)
    return _slice_of_concatenate(op, above)


def _rows(op: ir.Operation) -> list[tuple[int, ...]]:
    names = ("start_indices", "limit_indices", "strides")
    return [int_list(op, name) for name in names]


def _slice_of_slice(op: ir.Operation, above: ir.Operation) -> Match | None:
    outer = list(zip(*_rows(op), strict=True))
    inner = list(zip(*_rows(above), strict=True))
    starts, limits, strides = [], [], []
    for (start, stop, step), (first, end, stride) in zip(outer, inner, strict=True):
        starts.append(first + start * stride)
        strides.append(step * stride)
        limits.append(min(end, first + (stop - 1) * stride + 1))
    if 0 in op.results[0].type.shape:
        return None
    source = above.operands[0]
    return Match(op, lambda rw: make_slice(rw, source, starts, limits, strides))


def _slice_of_concatenate(op: ir.Operation, above: ir.Operation) -> Match | None:
    dim = above.attributes["dimension"].value
    starts, limits, strides = (list(row) for row in _rows(op))
    offset = 0
    for part in above.operands:
        extent = part.type.shape[dim]
        if starts[dim] >= offset and limits[dim] <= offset + extent:
            starts[dim] -= offset
            limits[dim] -= offset
            return Match(
                op, lambda rw, p=part: make_slice(rw, p, starts, limits, strides)
            )
        offset += extent
    return None


# ---------------------------------------------------------------- pad, reverse, iota


def pad_nothing(op: ir.Operation) -> Match | str | None:
    """Drops paddings of nothing; a padded empty array is a broadcast."""
    source, filler = op.operands
    if shape_of(source) is None or shape_of(op.results[0]) is None:
        return None
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    if not any(any(int_list(op, name)) for name in names):
        return _replaced(op, source)
    if 0 in source.type.shape:
        if not is_plain(op):
            return _LOST
        shape = op.results[0].type.shape
        return Match(op, lambda rewriter: rewriter.broadcast(filler, shape, []))
    return None


def reverse_nothing(op: ir.Operation) -> Match | str | None:
    """Drops reversals of dimensions that have one element, or none."""
    shape = shape_of(op.operands[0])
    if shape is None:
        return None
    if 0 in shape or all(shape[d] == 1 for d in int_list(op, "dimensions")):
        return _replaced(op, op.operands[0])
    return None


def iota_of_one(op: ir.Operation) -> Match | str | None:
    """Writes an iota along a dimension of size 1 as zeros."""
    shape = shape_of(op.results[0])
    if shape is None or shape[op.attributes["iota_dimension"].value] != 1:
        return None
    kind = element_type(op.results[0])
    if isinstance(kind, ir.ComplexType) or not is_plain(op):
        return _LOST
    return Match(op, lambda rewriter: rewriter.splat(0, shape, kind))


# ------------------------------------------------------------------- dynamic indices


def constant_indices(values) -> list[int] | None:
    """Returns scalar constants as integers, or None if one is not constant."""
    found = []
    for value in values:
        array = read_constant(value, 1)
        if array is None or array.dtype.kind not in "iu" or array.size != 1:
            return None
        found.append(int(array.reshape(())))
    return found


def _clamped(starts, extents, sizes) -> list[int]:
    rows = zip(starts, extents, sizes, strict=True)
    return [max(0, min(start, extent - size)) for start, extent, size in rows]


def static_slice(op: ir.Operation) -> Match | str | None:
    """Writes a dynamic_slice at constant places, or of everything, as a slice."""
    source, *indices = op.operands
    extents = shape_of(source)
    if extents is None or shape_of(op.results[0]) is None:
        return None
    sizes = int_list(op, "slice_sizes")
    number = splat_attribute(source)
    if number is not None and constant_of(source) is not None and is_plain(op):
        kind = element_type(source)
        return Match(op, lambda rewriter: rewriter.splat(number, sizes, kind))
    if source.type == op.results[0].type:
        return _replaced(op, source)
    starts = constant_indices(indices)
    if starts is None:
        return None
    if not is_plain(op):
        return _LOST
    starts = _clamped(starts, extents, sizes)
    limits = [start + size for start, size in zip(starts, sizes, strict=True)]
    return Match(op, lambda rewriter: make_slice(rewriter, source, starts, limits))


def update_everything(op: ir.Operation) -> Match | str | None:
    """Drops a dynamic_update_slice of all elements, or of none."""
    target, update, *_ = op.operands
    if shape_of(target) is None or shape_of(update) is None:
        return None
    if 0 in update.type.shape:
        return _replaced(op, target)
    return _replaced(op, update)


def gather_to_slice(op: ir.Operation) -> Match | str | None:
    """Writes a gather of one window at a constant place as a slice."""
    source, indices = op.operands
    extents = shape_of(source)
    if (
        extents is None
        or shape_of(op.results[0]) is None
        or len(indices.type.shape) > 1
    ):
        return None
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    if list(numbers.operand_batching_dims) or numbers.index_vector_dim != 0:
        return None
    array = read_constant(indices, 64)
    if array is None or array.dtype.kind not in "iu" or 0 in extents:
        return None
    if list(numbers.offset_dims) != list(range(len(op.results[0].type.shape))):
        return None
    if not is_plain(op):
        return _LOST
    sizes, starts = int_list(op, "slice_sizes"), [0] * len(extents)
    for dim, start in zip(numbers.start_index_map, array.reshape(-1), strict=True):
        starts[dim] = int(start)
    starts = _clamped(starts, extents, sizes)
    limits = [start + size for start, size in zip(starts, sizes, strict=True)]

    def build(rewriter: Rewriter) -> ir.Value:
        window = make_slice(rewriter, source, starts, limits)
        if window.type == op.results[0].type:
            return window
        return rewriter.reshape(window, op.results[0].type.shape)

    return Match(op, build)


# ---------------------------------------------------------------------------- tuples


def element_of_tuple(op: ir.Operation) -> Match | str | None:
    """Takes an element from what the tuple was made of."""
    above = producer(op.operands[0], "stablehlo.tuple")
    if above is None:
        return None
    return _replaced(op, above.operands[op.attributes["index"].value])


def tuple_of_elements(op: ir.Operation) -> Match | str | None:
    """A tuple of all elements of a tuple is that tuple."""
    parts = [producer(v, "stablehlo.get_tuple_element") for v in op.operands]
    if not parts or any(part is None for part in parts):
        return None
    whole = parts[0].operands[0]
    for number, part in enumerate(parts):
        if part.operands[0] != whole or part.attributes["index"].value != number:
            return None
    return _replaced(op, whole)


PATTERNS = {
    "stablehlo.concatenate": (concatenate_less,),
    "stablehlo.dynamic_slice": (static_slice,),
    "stablehlo.dynamic_update_slice": (update_everything,),
    "stablehlo.gather": (gather_to_slice,),
    "stablehlo.get_tuple_element": (element_of_tuple,),
    "stablehlo.iota": (iota_of_one,),
    "stablehlo.pad": (pad_nothing,),
    "stablehlo.reverse": (reverse_nothing,),
    "stablehlo.slice": (simpler_slice,),
    "stablehlo.transpose": (transpose_of_transpose,),
    "stablehlo.tuple": (tuple_of_elements,),
}
RESHAPING_PATTERNS = {
    "stablehlo.broadcast_in_dim": (broadcast_to_reshape,),
    "stablehlo.transpose": (transpose_to_reshape,),
}
