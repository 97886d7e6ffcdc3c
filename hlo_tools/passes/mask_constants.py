"""Values that are one constant where a mask is on and another where it is off.

A boolean, a boolean as a number, a select of two constants. Arithmetic with another
constant is done on the two constants, if it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax.extend.mlir import ir

from hlo_tools.passes.exact_arithmetic import (
    ARITHMETIC,
    exact_convert,
    exact_result,
)
from hlo_tools.rewriting import (
    Match,
    Rewriter,
    element_type,
    is_mask,
    is_plain,
    producer,
    shape_of,
    splat_number,
    users,
)


@dataclass(frozen=True)
class TwoValued:
    """A value that is one constant where a mask is on, another where it is off."""

    mask: ir.Value
    on: bool | int | float
    off: bool | int | float


def two_valued(value: ir.Value) -> TwoValued | None:
    """Reads a value as a mask and two constants; None if it is something else."""
    if is_mask(value):
        return TwoValued(value, True, False)
    op = producer(value)
    if op is None or not is_plain(op) or shape_of(value) is None:
        return None
    kind = element_type(value)
    if isinstance(kind, ir.ComplexType):
        return None
    if op.name == "stablehlo.convert" and is_mask(op.operands[0]):
        one, zero = (1, 0) if isinstance(kind, ir.IntegerType) else (1.0, 0.0)
        return TwoValued(op.operands[0], one, zero)
    if op.name == "stablehlo.select":
        mask, *sides = op.operands
        on, off = (splat_number(side) for side in sides)
        if on is None or off is None or shape_of(mask) != shape_of(value):
            return None
        return TwoValued(mask, on, off)
    return None


def choice(op: ir.Operation, mask: ir.Value, on: bool, off: bool) -> Match:
    """Replaces a boolean by what it is where `mask` is on and off."""
    if on == off:
        return Match(op, lambda rewriter: boolean(rewriter, mask, on))
    if on:
        return Match(op, lambda rewriter: mask)
    return Match(op, lambda rewriter: negated(rewriter, mask))


def boolean(rewriter: Rewriter, like: ir.Value, number: bool) -> ir.Value:
    """Makes a constant mask of the type of `like`."""
    return rewriter.splat(number, like.type.shape, element_type(like))


def negated(rewriter: Rewriter, mask: ir.Value) -> ir.Value:
    """Makes `not mask`."""
    return rewriter.create("stablehlo.not", [mask], mask.type)


def arithmetic_of_mask(op: ir.Operation) -> Match | str | None:
    """Writes arithmetic of a mask's number and a constant as a select.

    `(1 - mask) * -1e9` becomes `select(mask, -0.0, -1e9)`. Looks at the users of `op`,
    as few operations are a mask's number and many are arithmetic.
    """
    value = op.results[0]
    if is_mask(value):
        return None
    found = two_valued(value)
    if found is None:
        return None
    reason = None
    for user in users(value):
        if user.name not in ARITHMETIC or not is_plain(user):
            continue
        side = 0 if user.operands[0] == value else 1
        number = splat_number(user.operands[1 - side])
        if number is None or shape_of(user.results[0]) is None:
            continue
        results = []
        for mine in (found.on, found.off):
            pair = (mine, number) if side == 0 else (number, mine)
            results.append(exact_result(user.name, *pair, element_type(value)))
        if _xla_rounds_zero(op, user.name, number, results):
            reason = "XLA gives 0.0 here where the result is -0.0"
            continue
        reason = _select_constants(user, found.mask, results)
        if isinstance(reason, Match):
            return reason
    return reason


def _xla_rounds_zero(
    op: ir.Operation, name: str, number: bool | int | float, results: list[Any]
) -> bool:
    """Returns whether XLA takes x + 0.0 for x, or mask * c for select(mask, c, 0.0).

    Either gives a zero of the other sign than IEEE 754 does. Folding would be right,
    and yet change what the compiled program returns.
    """
    if name != "stablehlo.multiply":
        return isinstance(number, float) and number == 0
    zeros = [x for x in results if isinstance(x, float) and x == 0]
    negative = any(math.copysign(1, x) < 0 for x in zeros)
    return op.name == "stablehlo.convert" and negative


def _select_constants(op: ir.Operation, mask: ir.Value, results: list[Any]) -> Any:
    if None in results:
        return "the constants would be rounded"
    shape, kind = op.results[0].type.shape, element_type(op.results[0])

    def build(rewriter: Rewriter) -> ir.Value:
        sides = [rewriter.splat(number, shape, kind) for number in results]
        return rewriter.create("stablehlo.select", [mask, *sides], op.results[0].type)

    return Match(op, build)


def convert_of_select(op: ir.Operation) -> Match | str | None:
    """Converts the two constants of a mask instead of their select."""
    source, result = op.operands[0], op.results[0]
    if producer(source, "stablehlo.select") is None or not is_plain(op):
        return None
    if is_mask(source):
        return None
    found = None if shape_of(result) is None else two_valued(source)
    if found is None:
        return None
    old, new = element_type(source), element_type(result)
    results = [exact_convert(number, old, new) for number in (found.on, found.off)]
    if None not in results and is_mask(result):
        on, off = (bool(number) for number in results)
        return choice(op, found.mask, on, off)
    return _select_constants(op, found.mask, results)
