"""Brings masks to one form: comparisons, selects and logic of booleans.

Every rewrite keeps each bit of each value. Comparisons of floats are never inverted
(NaN), constants are only folded where the arithmetic is exact (so that rounding,
denormals and excess precision can not matter), and constants only cross an integer
comparison of iotas where the known ranges exclude an overflow.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools.passes.exact_arithmetic import is_subnormal
from hlo_tools.passes.iota_ranges import canonical_comparison
from hlo_tools.passes.mask_constants import (
    arithmetic_of_mask,
    boolean,
    choice,
    convert_of_select,
    negated,
    two_valued,
)
from hlo_tools.rewriting import (
    Match,
    Rewriter,
    element_type,
    is_mask,
    is_plain,
    producer,
    rewrite,
    shape_of,
    single_user,
    splat_attribute,
    splat_number,
)

_INVERSE = {"EQ": "NE", "NE": "EQ", "LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT"}
_SWAPPED = {"EQ": "EQ", "NE": "NE", "LT": "GT", "GE": "LE", "GT": "LT", "LE": "GE"}
_HOLDS = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt,
    "GE": operator.ge, "GT": operator.gt, "LE": operator.le,
}  # fmt: skip
_LOST = "the operation has attributes that would be lost"


def _joined(rewriter: Rewriter, name: str, *masks: ir.Value) -> ir.Value:
    return rewriter.create(name, masks, masks[0].type)


# ------------------------------------------------------------------- comparisons


@dataclass(frozen=True)
class _Compare:
    """A comparison whose sides are plain numbers of static shape."""

    direction: str
    kind: str  # "SIGNED", "UNSIGNED", "FLOAT", "TOTALORDER" or ""
    attribute: Any
    left: ir.Value
    right: ir.Value

    @classmethod
    def read(cls, op: ir.Operation) -> _Compare | None:
        left, right = op.operands
        if any(shape_of(v) is None for v in (left, right, op.results[0])):
            return None
        if not is_plain(op):
            return None
        if isinstance(element_type(left), ir.ComplexType):
            return None
        direction = op.attributes["comparison_direction"]
        kind, attribute = "", None
        if "compare_type" in op.attributes:
            attribute = op.attributes["compare_type"]
            kind = stablehlo.ComparisonTypeAttr(attribute).value
        direction = stablehlo.ComparisonDirectionAttr(direction).value
        return cls(direction, kind, attribute, left, right)

    @property
    def is_integer(self) -> bool:
        return isinstance(element_type(self.left), ir.IntegerType)


def compare_constants(op: ir.Operation) -> Match | str | None:
    """Decides comparisons with a constant: of a constant, or of a mask in disguise."""
    compare = _Compare.read(op)
    if compare is None:
        return None
    right = splat_number(compare.right)
    if right is None:
        return None
    if compare.kind == "TOTALORDER":
        return "a total order tells -0.0 from 0.0"
    holds, kind = _HOLDS[compare.direction], element_type(compare.left)
    left = splat_number(compare.left)
    if left is not None:
        if any(is_subnormal(number, kind) for number in (left, right)):
            return "a subnormal constant"
        known = holds(left, right)
        return Match(op, lambda rewriter: boolean(rewriter, op.results[0], known))
    values = two_valued(compare.left)
    if values is None:
        return None
    if any(is_subnormal(number, kind) for number in (values.on, values.off, right)):
        return "a subnormal constant"
    return choice(op, values.mask, holds(values.on, right), holds(values.off, right))


def constant_to_the_right(op: ir.Operation) -> Match | str | None:
    """Writes c < x as x > c; exact for floats too, as NaN is on neither side."""
    compare = _Compare.read(op)
    if compare is None or splat_attribute(compare.left) is None:
        return None
    if splat_attribute(compare.right) is not None:
        return None
    direction = _SWAPPED[compare.direction]
    sides = compare.right, compare.left
    return Match(op, lambda rw: rw.compare(direction, *sides, compare.attribute))


def compare_positions(op: ir.Operation) -> Match | str | None:
    """Brings a comparison of iotas to `iota >= iota + constant`."""
    compare = _Compare.read(op)
    if compare is None or not compare.is_integer:
        return None
    found = canonical_comparison(compare.left, compare.direction, compare.right)
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, bool):
        return Match(op, lambda rewriter: boolean(rewriter, op.results[0], found))
    if found.direction == compare.direction and found.is_made_by(op):
        return None
    shape, kind = compare.left.type.shape, element_type(compare.left)

    def build(rewriter: Rewriter) -> ir.Value:
        sides = found.operands(rewriter, shape, kind)
        return rewriter.compare(found.direction, *sides, compare.attribute)

    return Match(op, build)


# ------------------------------------------------------------------------- logic


def simplify_not(op: ir.Operation) -> Match | str | None:
    """not(not p), not(constant), and not(compare) of integers."""
    source = op.operands[0]
    above = producer(source)
    if above is None or not is_mask(source) or source.type != op.results[0].type:
        return None
    if not (is_plain(op) and is_plain(above)):
        return _LOST
    number = splat_number(source)
    if number is not None:
        return Match(op, lambda rewriter: boolean(rewriter, source, not number))
    if above.name == "stablehlo.not":
        return Match(op, lambda rewriter: above.operands[0])
    if above.name != "stablehlo.compare":
        return None
    compare = _Compare.read(above)
    if compare is None or not compare.is_integer:
        return "the inverse of a float comparison differs for NaN"
    inverse = _INVERSE[compare.direction]
    sides = compare.left, compare.right
    return Match(op, lambda rw: rw.compare(inverse, *sides, compare.attribute))


# (name, the constant) -> what `x name constant` is.
_LOGIC = {
    ("stablehlo.and", True): "x",
    ("stablehlo.and", False): "constant",
    ("stablehlo.or", True): "constant",
    ("stablehlo.or", False): "x",
    ("stablehlo.xor", True): "not",
    ("stablehlo.xor", False): "x",
}


def simplify_logic(op: ir.Operation) -> Match | str | None:
    """and, or, xor of a mask with a constant or with itself."""
    left, right = op.operands
    if not is_mask(op.results[0]) or not is_mask(left):
        return None
    if left == right and op.name != "stablehlo.xor":
        return Match(op, lambda rewriter: left) if is_plain(op) else _LOST
    for mask, other in ((left, right), (right, left)):
        number = splat_number(other)
        if number is None:
            continue
        if not is_plain(op):
            return _LOST
        result = _LOGIC[op.name, bool(number)]
        if result == "not":
            return Match(op, lambda rewriter, mask=mask: negated(rewriter, mask))
        value = mask if result == "x" else other
        return Match(op, lambda rewriter, value=value: value)
    return None


# ----------------------------------------------------------------------- selects


def _same(left: ir.Value, right: ir.Value) -> bool:
    """Returns whether two values are one, or equal constants."""
    if left == right:
        return True
    if left.type != right.type:
        return False
    numbers = splat_attribute(left), splat_attribute(right)
    if numbers[0] is None or numbers[1] is None:
        return False
    return numbers[0] == numbers[1]


def simplify_select(op: ir.Operation) -> Match | str | None:
    """Selects that choose nothing, or whose mask is inverted."""
    mask, on, off = op.operands
    kind = op.results[0].type
    if shape_of(op.results[0]) is None or on.type != kind or off.type != kind:
        return None
    known = splat_number(mask)
    inverted = producer(mask, "stablehlo.not")
    if known is None and inverted is None and on != off:
        return None
    if not is_plain(op) or (inverted is not None and not is_plain(inverted)):
        return _LOST
    if known is not None or on == off:
        chosen = off if known is False else on
        return Match(op, lambda rewriter: chosen)
    sides = [inverted.operands[0], off, on]
    return Match(op, lambda rw: rw.with_operands(op, sides, op.results[0].type.shape))


def select_ofbooleans(op: ir.Operation) -> Match | str | None:
    """Writes a select of masks as logic."""
    mask, on, off = op.operands
    if not is_mask(op.results[0]) or shape_of(mask) != shape_of(op.results[0]):
        return None
    numbers = [splat_number(side) for side in (on, off)]
    if numbers == [None, None]:
        return None
    if not is_plain(op):
        return _LOST
    if None not in numbers:
        return choice(op, mask, bool(numbers[0]), bool(numbers[1]))
    if numbers[0] is not None and numbers[0]:
        return Match(op, lambda rw: _joined(rw, "stablehlo.or", mask, off))
    if numbers[1] is not None and not numbers[1]:
        return Match(op, lambda rw: _joined(rw, "stablehlo.and", mask, on))
    return None


def nested_select(op: ir.Operation) -> Match | str | None:
    """A select of a select with the same mask, or with a side in common."""
    if shape_of(op.results[0]) is None:
        return None
    for number, side in enumerate(list(op.operands)[1:]):
        inner = producer(side, "stablehlo.select")
        if inner is None or not is_plain(inner):
            continue
        found = _nested(op, inner, number)
        if found is not None:
            return found if is_plain(op) else _LOST
    return None


def _nested(op: ir.Operation, inner: ir.Operation, side: int) -> Match | None:
    """Merges `op` with the select that is its side 0 (on) or 1 (off)."""
    mask, *sides = op.operands
    inner_mask, *inner_sides = inner.operands
    shape = op.results[0].type.shape
    if inner_mask == mask:
        sides[side] = inner_sides[side]
        return Match(op, lambda rw: rw.with_operands(op, [mask, *sides], shape))
    other = 1 - side
    if single_user(inner.results[0]) is None or mask.type != inner_mask.type:
        return None
    if not is_mask(mask) or not _same(sides[other], inner_sides[other]):
        return None
    # where(p, where(q, a, b), b) = where(p & q, a, b), and p | q for the off side.
    name = "stablehlo.and" if side == 0 else "stablehlo.or"

    def build(rewriter: Rewriter) -> ir.Value:
        both = _joined(rewriter, name, mask, inner_mask)
        return rewriter.with_operands(op, [both, *inner_sides], shape)

    return Match(op, build)


PATTERNS = {
    "stablehlo.compare": (compare_constants, compare_positions, constant_to_the_right),
    "stablehlo.not": (simplify_not,),
    "stablehlo.and": (simplify_logic,),
    "stablehlo.or": (simplify_logic,),
    "stablehlo.xor": (simplify_logic,),
    "stablehlo.select": (
        simplify_select,
        select_ofbooleans,
        nested_select,
        arithmetic_of_mask,
    ),
    "stablehlo.convert": (convert_of_select, arithmetic_of_mask),
}


@dataclass(frozen=True)
class CanonicalizeMasks:
    """Brings masks to one form."""

    name: ClassVar[str] = "canonicalize-masks"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "one form for masks: compare, select, logic of booleans"

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        return rewrite(module.module.operation, PATTERNS) > 0
