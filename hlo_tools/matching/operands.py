"""Finds the array behind an operand of a product.

Between a query, key or value array and the product that uses it there often
stand a transpose, a repeat of the key-value heads, a widening conversion or a
constant scale.  They are peeled off, so that a kernel reads the array itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hlo_tools.matching.expressions import is_float
from hlo_tools.matching.index_space import (
    IncompatibleReshapeError,
    Index,
    SplitAtomError,
)
from hlo_tools.matching.reader import (
    SHAPE_OPS,
    Reader,
    defining_op,
    dtype_of,
    loop_invariant,
    operand_index,
    shape_of,
)

_WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


@dataclass
class Operand:
    """An operand of the attention, as a kernel reads it.

    Attributes:
      value: the array.
      index: how its dimensions relate to the index atoms.
      scale: constant factor between it and the product's operand.
      between: the values computed from it on the way to the product.
    """

    value: object
    index: Index
    scale: float = 1.0
    between: list = field(default_factory=list)


def _is_widening(op) -> bool:
    old, new = dtype_of(op.operands[0]), dtype_of(op.results[0])
    if not (is_float(old) and is_float(new)):
        return False
    return _WIDTH[new] > _WIDTH[old]


def _broadcasts_below(value) -> bool:
    """Returns whether shape operations lead down to a repeat of `value`."""
    while (op := defining_op(loop_invariant(value))) is not None:
        name = op.operation.name
        if name == "stablehlo.broadcast_in_dim":
            inner = math.prod(shape_of(op.operands[0]))
            if inner != math.prod(shape_of(op.results[0])):
                return True
        if name not in SHAPE_OPS and name != "stablehlo.convert":
            return False
        value = op.operands[0]
    return False


def _constant_factor(reader: Reader, op, index: Index):
    """Returns (array operand, factor) if `op` scales by a constant, else None."""
    name = op.operation.name
    if name not in ("stablehlo.multiply", "stablehlo.divide"):
        return None
    numbers = ((0, 1), (1, 0)) if name == "stablehlo.multiply" else ((0, 1),)
    for array, constant in numbers:
        expr = reader.read(op.operands[constant], index)
        if expr.kind != "const" or not is_float(expr.dtype):
            continue
        factor = float(expr.data)
        if name == "stablehlo.divide" and factor:
            factor = 1.0 / factor
        if factor and math.isfinite(factor):
            return op.operands[array], factor
    return None


def peel(reader: Reader, value, index: Index, *, scales: bool) -> Operand:
    """Returns the array behind `value`.

    Args:
      reader: reads constants.
      value, index: the product's operand and the index it is read at.
      scales: whether constant factors may be peeled off too.

    Raises:
      SplitAtomError: a repeat below a reshape needs finer atoms.
    """
    value = loop_invariant(value)
    best = Operand(value, index)
    scale, between = 1.0, []
    while (op := defining_op(value)) is not None:
        name, useful = op.operation.name, False
        if name in SHAPE_OPS:
            try:
                inner = operand_index(op, index)
            except IncompatibleReshapeError:
                break
            except SplitAtomError:
                if _broadcasts_below(op.operands[0]):
                    raise
                break
            useful = name == "stablehlo.transpose" or _drops(index, inner)
            operand = op.operands[0]
        elif name == "stablehlo.convert" and _is_widening(op):
            operand, inner, useful = op.operands[0], index, True
        elif scales and (found := _constant_factor(reader, op, index)):
            operand, factor = found
            scale, inner, useful = scale * factor, index, True
        else:
            break
        between.append(value)
        value, index = loop_invariant(operand), inner
        if useful:
            best = Operand(value, index, scale, list(between))
    return best


def _drops(outer: Index, inner: Index) -> bool:
    return {a for dim in outer for a in dim} != {a for dim in inner for a in dim}
