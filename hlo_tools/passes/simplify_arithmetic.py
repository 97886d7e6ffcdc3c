"""Identities of arithmetic, logic and comparisons.

Each is exact for every value, NaN and -0.0 included, except those of `LOOSE_PATTERNS`,
which give 0.0 where IEEE 754 has -0.0 (x + 0.0; XLA does the same by itself). A float
times 0 stays: it is NaN for NaN and infinities.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools.passes.constant_values import constant_of
from hlo_tools.rewriting import (
    Match,
    element_type,
    is_plain,
    producer,
    shape_of,
    splat_number,
)

_LOST = "the operation has attributes that would be lost"


def _is_integer(value: ir.Value) -> bool:
    return isinstance(element_type(value), ir.IntegerType)


def _is_minus_zero(number: float) -> bool:
    return number == 0 and math.copysign(1, number) < 0


def _all_ones(value: ir.Value, number: int) -> bool:
    """Returns whether every bit of an integer of the type of `value` is set."""
    width = element_type(value).width
    return int(number) & ((1 << width) - 1) == (1 << width) - 1


def _replaced(op: ir.Operation, value: ir.Value) -> Match | str:
    return Match(op, lambda rewriter: value) if is_plain(op) else _LOST


def _as_splat(op: ir.Operation, number: int) -> Match | str:
    if not is_plain(op):
        return _LOST
    kind = op.results[0].type
    return Match(op, lambda rw: rw.splat(number, kind.shape, kind.element_type))


def constant_right(op: ir.Operation) -> Match | str | None:
    """Writes c + x as x + c, for every operation that commutes."""
    left, right = op.operands
    if constant_of(left) is None or constant_of(right) is not None:
        return None
    if not is_plain(op):
        return _LOST
    return Match(
        op, lambda rw: rw.with_operands(op, [right, left], op.results[0].type.shape)
    )


def _neutral(op: ir.Operation) -> tuple[ir.Value, ir.Value, bool | int | float] | None:
    """Reads x op c: (x, c, the number); the constant may be on the right only."""
    if shape_of(op.results[0]) is None:
        return None
    left, right = op.operands
    number = splat_number(right)
    if number is None or left.type != op.results[0].type:
        return None
    return left, right, number


def add_nothing(op: ir.Operation) -> Match | str | None:
    """Drops integer x + 0 and float x + -0.0; -0.0 + 0.0 would be 0.0."""
    found = _neutral(op)
    if found is None:
        return None
    left, _, number = found
    if _is_integer(left):
        return _replaced(op, left) if number == 0 else None
    return _replaced(op, left) if _is_minus_zero(number) else None


def add_zero(op: ir.Operation) -> Match | str | None:
    """Drops float x + 0.0 and x - -0.0: not exact for x = -0.0."""
    found = _neutral(op)
    if found is None or found[2] != 0:
        return None
    return _replaced(op, found[0])


def subtract_nothing(op: ir.Operation) -> Match | str | None:
    """Drops x - 0, and writes integer x - x as 0."""
    left, right = op.operands
    if left == right and shape_of(left) is not None and _is_integer(left):
        return _as_splat(op, 0)
    found = _neutral(op)
    if found is None or found[2] != 0:
        return None
    if not _is_integer(left) and _is_minus_zero(found[2]):
        return None
    return _replaced(op, left)


def multiply_plainly(op: ir.Operation) -> Match | str | None:
    """Drops x * 1, and writes integer x * 0 as 0."""
    found = _neutral(op)
    if found is None:
        return None
    if found[2] == 1:
        return _replaced(op, found[0])
    if found[2] == 0 and _is_integer(found[0]):
        return _replaced(op, found[1])
    return None


def divide_by_one(op: ir.Operation) -> Match | str | None:
    """Drops x / 1 and x to the power of 1."""
    found = _neutral(op)
    if found is None or found[2] != 1:
        return None
    return _replaced(op, found[0])


def integer_logic(op: ir.Operation) -> Match | str | None:
    """and, or, xor of an integer with itself, no bits or all bits."""
    left, right = op.operands
    if shape_of(left) is None or not _is_integer(left):
        return None
    name = op.name.partition(".")[2]
    if left == right:
        return _as_splat(op, 0) if name == "xor" else _replaced(op, left)
    found = _neutral(op)
    if found is None:
        return None
    number = int(found[2])
    ones = _all_ones(left, number)
    if (name == "and" and ones) or (name in ("or", "xor") and number == 0):
        return _replaced(op, left)
    if (name == "and" and number == 0) or (name == "or" and ones):
        return _replaced(op, right)
    return None


def same_sides(op: ir.Operation) -> Match | str | None:
    """Writes max(x, x) and min(x, x) as x."""
    left, right = op.operands
    return _replaced(op, left) if left == right else None


def compare_with_itself(op: ir.Operation) -> Match | str | None:
    """Decides integer comparisons of a value with itself; a NaN is not equal to it."""
    left, right = op.operands
    if left != right or shape_of(left) is None or not _is_integer(left):
        return None
    direction = stablehlo.ComparisonDirectionAttr(op.attributes["comparison_direction"])
    return _as_splat(op, direction.value in ("EQ", "GE", "LE"))


def twice(op: ir.Operation) -> Match | str | None:
    """Drops -(-x) and not(not x)."""
    above = producer(op.operands[0], op.name)
    if above is None or not is_plain(above):
        return None
    return _replaced(op, above.operands[0])


def part_of_complex(op: ir.Operation) -> Match | str | None:
    """real(complex(a, b)) is a, imag of it is b."""
    above = producer(op.operands[0], "stablehlo.complex")
    if above is None or not is_plain(above):
        return None
    return _replaced(op, above.operands[0 if op.name == "stablehlo.real" else 1])


def complex_of_parts(op: ir.Operation) -> Match | str | None:
    """complex(real(z), imag(z)) is z."""
    real = producer(op.operands[0], "stablehlo.real")
    imaginary = producer(op.operands[1], "stablehlo.imag")
    if real is None or imaginary is None or real.operands[0] != imaginary.operands[0]:
        return None
    if not (is_plain(real) and is_plain(imaginary)):
        return _LOST
    return _replaced(op, real.operands[0])


def select_by_inverse(op: ir.Operation) -> Match | str | None:
    """Selects by p, sides swapped, where the mask is a broadcast of not p."""
    spread = producer(op.operands[0], "stablehlo.broadcast_in_dim")
    if spread is None:
        return None
    inverted = producer(spread.operands[0], "stablehlo.not")
    if inverted is None:
        return None
    if not all(is_plain(one) for one in (op, spread, inverted)):
        return _LOST
    source, (mask, on, off) = inverted.operands[0], op.operands

    def build(rewriter):
        new = rewriter.with_operands(spread, [source], mask.type.shape)
        return rewriter.with_operands(op, [new, off, on], op.results[0].type.shape)

    return Match(op, build)


type _Pattern = Callable[[ir.Operation], Match | str | None]
PATTERNS: dict[str, tuple[_Pattern, ...]] = {
    "stablehlo.add": (constant_right, add_nothing),
    "stablehlo.subtract": (subtract_nothing,),
    "stablehlo.multiply": (constant_right, multiply_plainly),
    "stablehlo.divide": (divide_by_one,),
    "stablehlo.power": (divide_by_one,),
    "stablehlo.maximum": (constant_right, same_sides),
    "stablehlo.minimum": (constant_right, same_sides),
    "stablehlo.and": (constant_right, integer_logic),
    "stablehlo.or": (constant_right, integer_logic),
    "stablehlo.xor": (constant_right, integer_logic),
    "stablehlo.compare": (compare_with_itself,),
    "stablehlo.negate": (twice,),
    "stablehlo.not": (twice,),
    "stablehlo.real": (part_of_complex,),
    "stablehlo.imag": (part_of_complex,),
    "stablehlo.complex": (complex_of_parts,),
    "stablehlo.select": (select_by_inverse,),
}
# Where "reassociating" rewrites are allowed.
LOOSE_PATTERNS: dict[str, tuple[_Pattern, ...]] = {
    "stablehlo.add": (add_zero,),
    "stablehlo.subtract": (add_zero,),
}
