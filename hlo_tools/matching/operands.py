"""Finds the array behind an operand of a product.

Between a query, key or value array and the product that uses it there often
stand a transpose, a repeat of the key-value heads, a widening conversion or a
constant scale.  They are peeled off, so that a kernel reads the array itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hlo_tools.matching.expressions import is_float
from hlo_tools.matching.index_space import (
    Atom,
    Dim,
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


def is_narrowing(value) -> bool:
    """Returns whether a value is another one rounded to fewer bits."""
    op = defining_op(value)
    if op is None or op.operation.name != "stablehlo.convert":
        return False
    old, new = dtype_of(op.operands[0]), dtype_of(value)
    return is_float(old) and is_float(new) and _WIDTH[new] < _WIDTH[old]


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


@dataclass
class Step:
    """One place on the way from a product's operand down to its array.

    Attributes:
      value, index: as in `Operand`.
      scale: constant factor between it and the product's operand.
      above: the values computed from it on the way.
    """

    value: object
    index: Index
    scale: float
    above: tuple


def trail(reader: Reader, value, index: Index, origin: Callable) -> list[Step]:
    """Returns every array that an operand is a rearrangement or multiple of.

    Conversions between floating point types are passed, and so are barriers and
    saved stacks (`origin`).
    """
    steps, scale, above = [], 1.0, ()
    while True:
        value = origin(value)
        steps.append(Step(value, index, scale, above))
        op = defining_op(value)
        if op is None or not len(op.operands):
            return steps
        name, operand, inner = op.operation.name, op.operands[0], index
        if name in SHAPE_OPS:
            try:
                inner = operand_index(op, index)
            except IncompatibleReshapeError:
                return steps
            except SplitAtomError:
                if _broadcasts_below(op.operands[0]):
                    raise
                return steps
        elif name == "stablehlo.convert":
            if not (is_float(dtype_of(operand)) and is_float(dtype_of(value))):
                return steps
        elif found := _constant_factor(reader, op, index):
            operand, factor = found
            scale *= factor
        else:
            return steps
        above, value, index = (*above, value), operand, inner


def unify(index: Index, known: Index, fresh: set[Atom]) -> dict[Atom, Dim] | None:
    """Names the `fresh` atoms of an index after those of another one.

    Returns:
      fresh atom -> atoms of `known`, or None if the two can not be the same.

    Raises:
      SplitAtomError: a fresh atom stands for several.
    """
    names: dict[Atom, Dim] = {}
    for ours, theirs in zip(index, known, strict=True):
        left, right = list(ours), list(theirs)
        while left:
            atom = left.pop(0)
            if atom not in fresh:
                if not right or right.pop(0) is not atom:
                    return None
                continue
            if not right:
                return None
            other = right.pop(0)
            if atom.size > other.size and atom.size % other.size == 0:
                raise SplitAtomError(atom, (other.size, atom.size // other.size))
            if atom.size < other.size and other.size % atom.size == 0:
                raise SplitAtomError(other, (atom.size, other.size // atom.size))
            if atom.size != other.size or names.setdefault(atom, (other,)) != (other,):
                return None
        if right:
            return None
    return names


def renamed(index: Index, names: dict[Atom, Dim]) -> Index:
    """Returns an index with fresh atoms replaced by their names."""
    return tuple(
        tuple(part for atom in dim for part in names.get(atom, (atom,)))
        for dim in index
    )
