"""Arithmetic on constants that is exact, or not done at all.

A constant may be folded in a bitwise pass only if no rounding happens: then denormals
flushed by some hardware, XLA's excess precision and double rounding can not matter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from jax.extend.mlir import ir

from hlo_tools.rewriting import numpy_dtype

type Number = bool | int | float

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "stablehlo.add": operator.add,
    "stablehlo.multiply": operator.mul,
    "stablehlo.subtract": operator.sub,
}


def is_subnormal(number: Number, kind: ir.Type) -> bool:
    """Returns whether some hardware reads the number as zero.

    True, to be safe, for float types that NumPy does not know.
    """
    if not isinstance(number, float) or number == 0 or not math.isfinite(number):
        return False
    return abs(number) < _smallest_normal(str(kind), kind)


def is_representable(number: float, kind: ir.Type) -> bool:
    """Returns whether a float type holds the number, sign of zero included."""
    try:
        with np.errstate(all="ignore"):
            stored = float(np.asarray(number, numpy_dtype(kind)))
    except TypeError:
        return False
    return stored == number and math.copysign(1, stored) == math.copysign(1, number)


_SMALLEST: dict[str, float] = {}


def _smallest_normal(text: str, kind: ir.Type) -> float:
    if text not in _SMALLEST:
        try:
            info = ml_dtypes.finfo(numpy_dtype(kind))
            _SMALLEST[text] = float(info.smallest_normal)
        except TypeError:
            _SMALLEST[text] = math.inf
    return _SMALLEST[text]


def integer_bounds(kind: ir.Type) -> tuple[int, int]:
    """Returns the least and the largest value of an integer type."""
    if kind.is_unsigned:
        return 0, 2**kind.width - 1
    return -(2 ** (kind.width - 1)), 2 ** (kind.width - 1) - 1


def exact_result(
    name: str, left: Number, right: Number, kind: ir.Type
) -> int | float | None:
    """Returns the sum, difference or product where no rounding happens.

    Args:
      name: "stablehlo.add", "stablehlo.subtract" or "stablehlo.multiply".
      left, right: numbers of the type `kind`.
      kind: an element type, neither boolean nor complex.

    Returns:
      None for NaN, for what is rounded or overflows, and for subnormal numbers.
    """
    function = ARITHMETIC[name]
    if isinstance(kind, ir.IntegerType):
        result = function(int(left), int(right))
        low, high = integer_bounds(kind)
        return result if low <= result <= high else None
    result = function(float(left), float(right))
    if math.isnan(result) or any(is_subnormal(x, kind) for x in (left, right, result)):
        return None
    if math.isfinite(left) and math.isfinite(right):
        if not math.isfinite(result):
            return None
        if function(Fraction(left), Fraction(right)) != Fraction(result):
            return None
    return result if is_representable(result, kind) else None


def exact_convert(number: Number, old: ir.Type, new: ir.Type) -> Number | None:
    """Returns a number in another element type if it has the same value there.

    A conversion to booleans is a comparison with zero. None for NaN, for what is
    rounded or out of range, and for subnormal numbers.
    """
    if number != number or is_subnormal(number, old):
        return None
    if isinstance(new, ir.IntegerType):
        if new.width == 1:
            return number != 0
        if not math.isfinite(number) or number != int(number):
            return None
        low, high = integer_bounds(new)
        return int(number) if low <= number <= high else None
    if not isinstance(new, ir.FloatType):
        return None
    result = float(number)
    if result != number or is_subnormal(result, new):
        return None
    return result if is_representable(result, new) else None
