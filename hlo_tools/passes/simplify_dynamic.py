"""Operations with dynamic shapes or sizes whose result is static after all."""

from __future__ import annotations

from jax.extend.mlir import ir

from hlo_tools.passes.constant_values import read_constant
from hlo_tools.passes.simplify_placement import make_slice
from hlo_tools.rewriting import (
    Match,
    element_type,
    int_list,
    is_identity,
    is_plain,
    producer,
    shape_of,
)

_LOST = "the operation has attributes that would be lost"


def _integers(value: ir.Value) -> list[int] | None:
    """Returns a constant list of sizes."""
    array = read_constant(value, 64)
    if array is None or array.dtype.kind not in "iu":
        return None
    return [int(number) for number in array.reshape(-1)]


def dimension_size(op: ir.Operation) -> Match | str | None:
    """The size of a static dimension is a constant."""
    kind, dim = op.operands[0].type, op.attributes["dimension"].value
    if not isinstance(kind, ir.RankedTensorType) or kind.is_dynamic_dim(dim):
        return None
    if not is_plain(op):
        return _LOST
    size, element = kind.shape[dim], element_type(op.results[0])
    return Match(op, lambda rewriter: rewriter.splat(size, [], element))


def set_whole_size(op: ir.Operation) -> Match | str | None:
    """Drops a set_dimension_size to the size that is there."""
    source = op.operands[0]
    if shape_of(source) is None or source.type != op.results[0].type:
        return None
    size = _integers(op.operands[1])
    if size != [source.type.shape[op.attributes["dimension"].value]]:
        return None
    return Match(op, lambda rewriter: source) if is_plain(op) else _LOST


def static_reshape(op: ir.Operation) -> Match | str | None:
    """A dynamic_reshape to a static shape is a reshape."""
    shape = shape_of(op.results[0])
    if shape is None:
        return None
    if not is_plain(op):
        return _LOST
    return Match(op, lambda rewriter: rewriter.reshape(op.operands[0], shape))


def static_broadcast(op: ir.Operation) -> Match | str | None:
    """A dynamic_broadcast_in_dim between static shapes, or one that repeats nothing."""
    source, sizes = op.operands
    dims = int_list(op, "broadcast_dimensions")
    if not is_plain(op):
        return _LOST
    if source.type == op.results[0].type and is_identity(dims):
        above = producer(source, "stablehlo.dynamic_reshape")
        reshaped = above is not None and above.operands[1] == sizes
        if reshaped or _keeps_every_size(op):
            return Match(op, lambda rewriter: source)
    shape = shape_of(op.results[0])
    if shape is None or shape_of(source) is None:
        return None
    return Match(op, lambda rewriter: rewriter.broadcast(source, shape, dims))


def _keeps_every_size(op: ir.Operation) -> bool:
    name = "known_nonexpanding_dimensions"
    if name not in op.attributes:
        return False
    return len(set(int_list(op, name))) == len(op.results[0].type.shape)


def static_iota(op: ir.Operation) -> Match | str | None:
    """A dynamic_iota of a static shape, or along a dimension of static size."""
    kind, dim = op.results[0].type, op.attributes["iota_dimension"].value
    if not is_plain(op):
        return _LOST
    if shape_of(op.results[0]) is not None:
        shape, element = kind.shape, kind.element_type
        return Match(op, lambda rewriter: rewriter.iota(shape, element, dim))
    if kind.encoding is not None or kind.is_dynamic_dim(dim) or kind.rank < 2:
        return None

    def build(rewriter):
        row = rewriter.iota([kind.shape[dim]], kind.element_type, 0)
        dims = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([dim])}
        operands = [row, op.operands[0]]
        return rewriter.create(
            "stablehlo.dynamic_broadcast_in_dim", operands, kind, dims
        )

    return Match(op, build)


def static_pad(op: ir.Operation) -> Match | str | None:
    """A dynamic_pad by constants is a pad."""
    source, filler, *amounts = op.operands
    rows = [_integers(value) for value in amounts]
    if None in rows or shape_of(op.results[0]) is None:
        return None
    if not is_plain(op):
        return _LOST
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    attributes = {
        name: ir.DenseI64ArrayAttr.get(row)
        for name, row in zip(names, rows, strict=True)
        if row is not None
    }
    kind = op.results[0].type
    return Match(
        op, lambda rw: rw.create("stablehlo.pad", [source, filler], kind, attributes)
    )


def static_gather(op: ir.Operation) -> Match | str | None:
    """A dynamic_gather of windows of constant size is a gather."""
    source, indices, sizes = op.operands
    row = _integers(sizes)
    if row is None or shape_of(op.results[0]) is None:
        return None
    if not is_plain(op):
        return _LOST
    attributes = {name: op.attributes[name] for name in op.attributes.keys()}
    attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(row)
    kind = op.results[0].type
    return Match(
        op,
        lambda rw: rw.create("stablehlo.gather", [source, indices], kind, attributes),
    )


def static_real_slice(op: ir.Operation) -> Match | str | None:
    """A real_dynamic_slice at constant places is a slice."""
    source, *rows = op.operands
    found = [_integers(value) for value in rows]
    if None in found or shape_of(op.results[0]) is None:
        return None
    if not is_plain(op):
        return _LOST
    return Match(op, lambda rewriter: make_slice(rewriter, source, *found))


PATTERNS = {
    "stablehlo.dynamic_broadcast_in_dim": (static_broadcast,),
    "stablehlo.dynamic_gather": (static_gather,),
    "stablehlo.dynamic_iota": (static_iota,),
    "stablehlo.dynamic_pad": (static_pad,),
    "stablehlo.dynamic_reshape": (static_reshape,),
    "stablehlo.get_dimension_size": (dimension_size,),
    "stablehlo.real_dynamic_slice": (static_real_slice,),
    "stablehlo.set_dimension_size": (set_whole_size,),
}
