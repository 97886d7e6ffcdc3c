"""Gathers multiplications by constants: one scale instead of several.

A rewrite is exact only in these cases, which are made under any exactness:
- x / c = x * (1 / c), c a power of two: both sides are the same real number, rounded
  once (1 / c must be no subnormal number).
- x * a * b = x * (a * b), a and b powers of two of magnitude 1 or more: scaling up
  loses no bits, and what overflows early would overflow late. Scaling down may round
  twice among the subnormal numbers, and down then up may lose bits, so those are not.
- x * 1 = x.
All others change the last bits (or what overflows), and need `reassociating`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from jax.extend.mlir import ir

from hlo_tools.passes.exact_arithmetic import is_subnormal
from hlo_tools.rewriting import (
    Match,
    Rewriter,
    element_type,
    is_plain,
    numpy_dtype,
    producer,
    rewrite,
    shape_of,
    single_user,
    splat_attribute,
    splat_number,
)

_MULTIPLY = "stablehlo.multiply"
_DIVIDE = "stablehlo.divide"
_FLOATS = ("f16", "bf16", "f32", "f64")
# As results of products: f16 could overflow before a late scale makes it small.
_WIDE_FLOATS = ("bf16", "f32", "f64")
_MOVES = frozenset(
    {"stablehlo.transpose", "stablehlo.reshape", "stablehlo.broadcast_in_dim"}
)
_LOST = "the operation has attributes that would be lost"
_ROUNDED = "the last bits could change"


@dataclass(frozen=True)
class _Scale:
    """`op` computes source * factor, or source / (1 / factor)."""

    op: ir.Operation
    source: ir.Value
    factor: Fraction


def _read_scale(op: ir.Operation | None) -> _Scale | None:
    """Reads a multiplication or division by a usual number."""
    if op is None or op.name not in (_MULTIPLY, _DIVIDE):
        return None
    left, right = op.operands
    source, number = left, splat_number(right)
    if number is None and op.name == _MULTIPLY:
        source, number = right, splat_number(left)
    if number is None or shape_of(source) is None:
        return None
    kind = element_type(source)
    if str(kind) not in _FLOATS or not _is_usual(number, kind):
        return None
    if splat_attribute(source) is not None:
        return None
    factor = Fraction(number)
    return _Scale(op, source, 1 / factor if op.name == _DIVIDE else factor)


def _is_usual(number: float, kind: ir.Type) -> bool:
    """Returns whether a number is finite, and neither zero nor subnormal."""
    return bool(number) and math.isfinite(number) and not is_subnormal(number, kind)


def _rounded(factor: Fraction, kind: ir.Type) -> float | None:
    """Returns a factor in an element type, or None if it leaves the usual range."""
    try:
        with np.errstate(all="ignore"):
            number = float(np.asarray(float(factor), numpy_dtype(kind)))
    except OverflowError:
        return None
    return number if _is_usual(number, kind) else None


def is_power_of_two(factor: Fraction) -> bool:
    """Returns whether a factor is 2**n or -(2**n), n negative too."""
    return all(x & (x - 1) == 0 for x in (abs(factor.numerator), factor.denominator))


def _merges_exactly(*factors: Fraction) -> bool:
    """Returns whether scaling by the product of the factors has the same bits."""
    if sum(abs(factor) != 1 for factor in factors) <= 1:
        return True
    return all(is_power_of_two(f) and abs(f) >= 1 for f in factors)


def _climb(value: ir.Value, block: Any) -> tuple[_Scale, list[ir.Operation]] | None:
    """Finds a scale above `value`, through operations that only move elements.

    Nobody else may use them, nor the scale itself, and all must be in `block`.

    Returns:
      The scale and the operations below it, the lowest first.
    """
    path: list[ir.Operation] = []
    while True:
        op = producer(value)
        if op is None:
            return None
        name = op.name
        if name not in _MOVES and name not in (_MULTIPLY, _DIVIDE):
            return None
        if op.block != block or not is_plain(op) or single_user(value) is None:
            return None
        if name not in _MOVES:
            scale = _read_scale(op)
            return None if scale is None else (scale, path)
        path.append(op)
        value = op.operands[0]


def _replay(
    rewriter: Rewriter, value: ir.Value, path: Sequence[ir.Operation]
) -> ir.Value:
    """Moves elements as the path did."""
    for op in reversed(path):
        value = rewriter.with_operands(op, [value], op.results[0].type.shape)
    return value


def _scaled(rewriter: Rewriter, value: ir.Value, number: float) -> ir.Value:
    if number == 1:
        return value
    constant = rewriter.splat(number, value.type.shape, element_type(value))
    return rewriter.create(_MULTIPLY, [value, constant], value.type)


def merge_scales(op: ir.Operation, exact: bool) -> Match | str | None:
    """Scales once where x is scaled twice in a row, or by 1."""
    outer = _read_scale(op)
    if outer is None:
        return None
    if not is_plain(op):
        return _LOST
    if outer.factor == 1:
        return Match(op, lambda rewriter: outer.source)
    above = producer(outer.source)
    inner = _read_scale(above)
    path: list[ir.Operation] = []
    if inner is None and above is not None and above.name in _MOVES:
        inner, path = _climb(outer.source, op.block) or (None, path)
    if inner is None:
        return None
    if not is_plain(inner.op):
        return _LOST
    if exact and not _merges_exactly(inner.factor, outer.factor):
        return _ROUNDED
    number = _rounded(inner.factor * outer.factor, element_type(op.results[0]))
    if number is None:
        return "the merged constant would overflow or be subnormal"
    return Match(op, lambda rw: _scaled(rw, _replay(rw, inner.source, path), number))


def multiply_by_reciprocal(op: ir.Operation, exact: bool) -> Match | str | None:
    """Multiplies by 1 / c instead of dividing by c."""
    scale = _read_scale(op)
    if scale is None:
        return None
    if not is_plain(op):
        return _LOST
    if exact and not is_power_of_two(scale.factor):
        return _ROUNDED
    number = _rounded(scale.factor, element_type(op.results[0]))
    if number is None:
        return "the reciprocal would overflow or be subnormal"
    return Match(op, lambda rewriter: _scaled(rewriter, scale.source, number))


def scale_product(op: ir.Operation) -> Match | str | None:
    """Scales the result of a dot_general instead of its operands."""
    found = [_climb(value, op.block) for value in op.operands]
    if found == [None, None]:
        return None
    result = op.results[0]
    if shape_of(result) is None or not is_plain(op):
        return _LOST
    if str(element_type(result)) not in _WIDE_FLOATS:
        return "the product could overflow before it is scaled"
    factors = [side[0].factor for side in found if side is not None]
    number = _rounded(math.prod(factors, start=Fraction(1)), element_type(result))
    if number is None:
        return "the merged constant would overflow or be subnormal"

    def build(rewriter: Rewriter) -> ir.Value:
        sides = [
            value if side is None else _replay(rewriter, side[0].source, side[1])
            for value, side in zip(op.operands, found, strict=True)
        ]
        product = rewriter.with_operands(op, sides, result.type.shape)
        return _scaled(rewriter, product, number)

    return Match(op, build)


@dataclass(frozen=True)
class FoldScales:
    """Gathers multiplications by constants.

    Attributes:
      through_dots: also move scales from a product's operands to its result
        (only where reassociating rewrites are allowed).
    """

    name: ClassVar[str] = "fold-scales"
    exactness: ClassVar[str] = "reassociating"
    summary: ClassVar[str] = "merge constant scales, and move them behind products"

    through_dots: bool = True

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        exact = not context.allows("reassociating")
        merge = functools.partial(merge_scales, exact=exact)
        reciprocal = functools.partial(multiply_by_reciprocal, exact=exact)
        patterns = {_MULTIPLY: (merge,), _DIVIDE: (merge, reciprocal)}
        if self.through_dots and not exact:
            patterns["stablehlo.dot_general"] = (scale_product,)
        return rewrite(module.module.operation, patterns) > 0
