"""Removes conversions that do nothing: to the same type, or there and back exactly.

A conversion is exact if the wider type holds every value of the narrower one:
bf16 -> f32 -> bf16 is dropped, f32 -> bf16 -> f32 rounds and never is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
from jax.extend.mlir import ir

from hlo_tools.passes.exact_arithmetic import exact_convert, integer_bounds
from hlo_tools.rewriting import (
    Match,
    element_type,
    is_plain,
    numpy_dtype,
    producer,
    rewrite,
    shape_of,
    splat_number,
)

_CONVERT = "stablehlo.convert"
_LOST = "the conversion has attributes that would be lost"
# Types that hold infinities, NaN and both zeros, as every float type may need.
_WIDE = ("f16", "bf16", "f32", "f64")
# Has neither zero nor sign, and its least value is subnormal as f32.
_ODD = ("f8E8M0FNU",)


def is_lossless(old: ir.Type, new: ir.Type) -> bool:
    """Returns whether every value of `old` is a value of `new`.

    Not for complex numbers, nor for conversions into 8-bit and smaller floats.
    """
    if old == new:
        return True
    if isinstance(old, ir.IntegerType) and isinstance(new, ir.IntegerType):
        low, high = _bounds(old)
        least, largest = _bounds(new)
        return least <= low and high <= largest
    if str(new) not in _WIDE or str(old) in _ODD:
        return False
    wide = ml_dtypes.finfo(numpy_dtype(new))
    if isinstance(old, ir.IntegerType):
        # The least value is a power of two: one bit of significand.
        bits = max(bound.bit_length() for bound in _bounds(old)[1:])
        return bits <= wide.nmant + 1 and float(2**bits) <= float(wide.max)
    try:
        narrow = ml_dtypes.finfo(numpy_dtype(old))
    except (TypeError, ValueError):  # complex, or a type that NumPy does not know
        return False
    return (
        narrow.nmant <= wide.nmant
        and float(narrow.max) <= float(wide.max)
        and float(narrow.smallest_subnormal) >= float(wide.smallest_subnormal)
    )


def _bounds(kind: ir.IntegerType) -> tuple[int, int]:
    return (0, 1) if kind.width == 1 else integer_bounds(kind)


def drop_convert(op: ir.Operation) -> Match | str | None:
    """Drops a conversion to the same type."""
    source = op.operands[0]
    if source.type != op.results[0].type:
        return None
    return Match(op, lambda rewriter: source) if is_plain(op) else _LOST


def merge_converts(op: ir.Operation) -> Match | str | None:
    """Converts x directly in convert(convert(x)), where both give the same value."""
    above = producer(op.operands[0], _CONVERT)
    if above is None:
        return None
    source, result = above.operands[0], op.results[0]
    if any(shape_of(value) is None for value in (source, op.operands[0], result)):
        return "dynamic or quantized shape"
    old, middle, new = (element_type(v) for v in (source, op.operands[0], result))
    if not is_lossless(old, middle):
        return f"{middle} does not hold every {old}"
    if _is_boolean(old) and isinstance(new, ir.FloatType):
        # XLA rewrites mask * x to select(mask, x, 0) where it sees the conversion of
        # a boolean: not the same for infinite, NaN and negative x.
        return "a boolean as a float"
    if not (is_lossless(old, new) or _truncates(old, middle, new)):
        return f"{new} does not hold every {old}"
    if not (is_plain(op) and is_plain(above)):
        return _LOST
    if source.type == result.type:
        return Match(op, lambda rewriter: source)
    return Match(op, lambda rewriter: rewriter.create(_CONVERT, [source], result.type))


def _is_boolean(kind: ir.Type) -> bool:
    return isinstance(kind, ir.IntegerType) and kind.width == 1


def _truncates(old: ir.Type, middle: ir.Type, new: ir.Type) -> bool:
    """Returns whether all are integers, so that low bits are kept at each step."""
    kinds = (old, middle, new)
    integers = all(isinstance(kind, ir.IntegerType) for kind in kinds)
    # A conversion to booleans asks for zero instead, which needs all the bits.
    return integers and new.width > 1


def convert_constant(op: ir.Operation) -> Match | str | None:
    """Writes a splat constant in the other type, if it has the same value there."""
    source, result = op.operands[0], op.results[0]
    number = splat_number(source)
    if number is None:
        return None
    if shape_of(result) is None or not is_plain(op):
        return _LOST
    kind = element_type(result)
    converted = exact_convert(number, element_type(source), kind)
    if converted is None:
        return "the constant would be rounded"
    return Match(op, lambda rw: rw.splat(converted, result.type.shape, kind))


PATTERNS = {_CONVERT: (drop_convert, merge_converts, convert_constant)}


@dataclass(frozen=True)
class FoldConverts:
    """Removes conversions that change no value."""

    name: ClassVar[str] = "fold-converts"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "remove conversion pairs that are exact"

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        return rewrite(module.module.operation, PATTERNS) > 0
