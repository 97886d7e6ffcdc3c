"""Recognizes a softmax over given axes, however it is spelled.

Covered: exp(x - m) / sum(exp(x - m)) with any m that is constant along the
axes (the maximum, a stopped gradient of it, zero), multiplication by the
reciprocal of the sum, exp(log_softmax(x)), exp(x - logsumexp(x)), and a
division that comes only after the value product.
"""

from __future__ import annotations

from dataclasses import dataclass

from hlo_tools.matching.expressions import Expr, is_float
from hlo_tools.matching.index_space import Dim, IncompatibleReshapeError, regroup
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.reader import (
    Reader,
    defining_op,
    loop_invariant,
    shape_of,
)


@dataclass(frozen=True)
class Softmax:
    """A recognized softmax.

    Attributes:
      scores: its argument; shifts that are constant along the axes are dropped.
      exponential: the exp node, for the deferred division.
      normalized: False if the division by the sum is still to come.
      stable: whether the maximum along the axes is subtracted first, so that a
        row of equal scores is uniform whatever the scores are.
    """

    scores: Expr
    exponential: Expr
    normalized: bool
    stable: bool


def strip_converts(expr: Expr) -> Expr:
    """Returns `expr` without conversions between floating point types."""
    while (
        expr.kind == "op"
        and expr.name == "convert"
        and is_float(expr.dtype)
        and is_float(expr.args[0].dtype)
    ):
        expr = expr.args[0]
    return expr


def look(reader: Reader, expr: Expr) -> Expr:
    """Returns what a leaf really is, one operation deep, without conversions."""
    expr = strip_converts(expr)
    while expr.kind == "leaf":
        deeper = reader.expand(expr.value, expr.index)
        if deeper is None or deeper is expr:
            return expr
        expr = strip_converts(deeper)
    return expr


def body_along(reader: Reader, reduce: Expr, axes: Dim) -> Expr | None:
    """Returns what a reduction sums, its reduced dimensions read at `axes`."""
    _, _, operand, inner, dims = reduce.data
    dims = sorted(dims)
    sizes = [shape_of(operand)[dim] for dim in dims]
    try:
        parts = regroup((axes,), sizes)
    except IncompatibleReshapeError:
        return None
    index = list(inner)
    for dim, part in zip(dims, parts, strict=True):
        index[dim] = part
    return strip_converts(reader.read(operand, tuple(index)))


def _is_op(expr: Expr, name: str) -> bool:
    return expr.kind == "op" and expr.name == name


def _absorb(reader: Reader, expr: Expr, axes: Dim, depth: int = 6) -> None:
    """Looks into a shift, so that the maximum it comes from joins the site."""
    expr = look(reader, expr)
    if expr.kind == "reduce":
        body_along(reader, expr, axes)
    elif expr.kind == "op" and depth:
        for arg in expr.args:
            _absorb(reader, arg, axes, depth - 1)


def _is_maximum_of(reader: Reader, shift: Expr, scores: Expr, axes: Dim) -> bool:
    """Returns whether `shift` is the largest of `scores` along the axes."""
    shift = look(reader, shift)
    if _is_op(shift, "select"):
        # where(is_finite(m), m, 0): another value only if m is infinite
        guard = look(reader, shift.args[0])
        if _is_op(guard, "is_finite") and shift.args[2].is_const(0):
            shift = look(reader, shift.args[1])
    if shift.kind != "reduce" or shift.name != "maximum":
        return False
    return body_along(reader, shift, axes) is scores


def _without_shift(reader: Reader, expr: Expr, axes: Dim) -> tuple[Expr, bool]:
    """Drops what is subtracted last, if it is constant along the axes.

    Returns:
      What is left, and whether exactly its maximum was subtracted.
    """
    expr = strip_converts(expr)
    if _is_op(expr, "subtract"):
        scores, shift = expr.args
    elif _is_op(expr, "add") and _is_op(strip_converts(expr.args[1]), "negate"):
        scores, shift = expr.args[0], strip_converts(expr.args[1]).args[0]
    else:
        return expr, False
    if shift.atoms & set(axes):
        return expr, False
    _absorb(reader, shift, axes)
    scores = strip_converts(scores)
    return scores, _is_maximum_of(reader, shift, scores, axes)


def _split_division(reader: Reader, expr: Expr) -> tuple[Expr, Expr | None]:
    """Returns (numerator, denominator or None)."""
    if _is_op(expr, "divide"):
        return expr.args[0], expr.args[1]
    if _is_op(expr, "multiply"):
        for one, other in (expr.args, expr.args[::-1]):
            reciprocal = look(reader, other)
            if _is_op(reciprocal, "divide") and reciprocal.args[0].is_const(1):
                return one, reciprocal.args[1]
    return expr, None


def is_sum_of(reader: Reader, expr: Expr, term: Expr, axes: Dim) -> bool:
    """Returns whether `expr` is the sum of `term` over exactly `axes`."""
    total = look(reader, expr)
    if total.kind != "reduce" or total.name != "add":
        return False
    return body_along(reader, total, axes) is term


def _is_logsumexp(reader: Reader, expr: Expr, exponent: Expr, axes: Dim) -> bool:
    """Returns whether an expression is log(sum(exp(exponent))), shifted or not."""
    expr = look(reader, expr)
    pairs = [(expr, None)]
    if _is_op(expr, "add"):
        pairs = [(expr.args[0], expr.args[1]), (expr.args[1], expr.args[0])]
    for log, shift in pairs:
        log = look(reader, log)
        if not _is_op(log, "log"):
            continue
        total = look(reader, log.args[0])
        if _is_op(total, "abs"):  # of a sum of exponentials, which is positive
            total = look(reader, total.args[0])
        if total.kind != "reduce" or total.name != "add":
            continue
        body = body_along(reader, total, axes)
        if body is None or not _is_op(body, "exponential"):
            continue
        inner = strip_converts(body.args[0])
        if shift is None and inner is exponent:
            return True
        if (
            shift is not None
            and _is_op(inner, "subtract")
            and strip_converts(inner.args[0]) is exponent
            and strip_converts(inner.args[1]) is strip_converts(shift)
        ):
            return True
    return False


def match_softmax(reader: Reader, probabilities: Expr, axes: Dim) -> Softmax:
    """Recognizes `probabilities` as a softmax over `axes`.

    Raises:
      NoMatchError: it is none; near if it is an exponential all the same.
    """
    numerator, denominator = _split_division(reader, strip_converts(probabilities))
    exponential = strip_converts(numerator)
    if not _is_op(exponential, "exponential"):
        _explain_probabilities(reader, strip_converts(probabilities), axes)
    exponent = strip_converts(exponential.args[0])
    scores, stable = _without_shift(reader, exponent, axes)
    if denominator is None:
        if _is_op(exponent, "subtract"):
            minuend = strip_converts(exponent.args[0])
            if _is_logsumexp(reader, exponent.args[1], minuend, axes):
                # a maximum inside the logarithm does not count: beside the low scores
                # of a row without keys, the logarithm is lost to rounding
                scores, stable = _without_shift(reader, minuend, axes)
                return Softmax(scores, exponential, True, stable)
        return Softmax(scores, exponential, False, stable)
    if not is_sum_of(reader, denominator, exponential, axes):
        _explain_denominator(reader, denominator, exponential)
    if not stable and scores is not exponent:
        raise NoMatchError(
            "the softmax subtracts something else than its own maximum, and may "
            "underflow to 0 / 0",
            near=True,
            got="an exponential of x - c, where c is not the maximum of x in its row",
            expected="exp(x - max(x)) along the keys",
            edit="use jax.nn.softmax, or subtract each row's own maximum",
        )
    return Softmax(scores, exponential, True, stable)


_RANDOM_OPS = ("stablehlo.rng_bit_generator", "stablehlo.rng")


def is_random(expr: Expr) -> bool:
    """Returns whether an expression is computed from random bits."""
    values = [node.value for node in expr.walk() if node.kind in ("leaf", "reduce")]
    seen, names = set(), set()
    while values and len(seen) < 400:
        op = defining_op(loop_invariant(values.pop()))
        if op is None or op in seen:
            continue
        seen.add(op)
        name = op.operation.name
        names.add(name)
        target = ""
        if name == "stablehlo.custom_call":
            target = str(op.attributes["call_target_name"])
        if name in _RANDOM_OPS or "threefry" in target:
            return True
        values.extend(op.operands)
    # uniform floats are made by shifting bits into a mantissa
    return {"stablehlo.bitcast_convert", "stablehlo.shift_right_logical"} <= names


def _explain_probabilities(reader: Reader, expr: Expr, axes: Dim):
    """Says what happens to a softmax between its division and the product."""
    inner, others = expr, []
    for _ in range(4):
        if inner.kind != "op" or inner.name not in ("multiply", "divide", "select"):
            break
        for arg in inner.args:
            try:
                match_softmax(reader, arg, axes)
            except NoMatchError:
                continue
            others.extend(other for other in inner.args if other is not arg)
            raise _changed_probabilities(others)
        candidates = [a for a in inner.args if a.kind == "op" and a.dtype != "i1"]
        if not candidates:
            break
        inner, rest = candidates[0], inner.args
        others.extend(other for other in rest if other is not inner)
    raise NoMatchError("the left factor of the value product is no softmax")


def _changed_probabilities(others: list[Expr]) -> NoMatchError:
    if any(node.kind == "dot" for other in others for node in other.walk()):
        return NoMatchError("the softmax is multiplied by another product")
    if any(is_random(other) for other in others):
        return NoMatchError(
            "dropout in the probabilities",
            near=True,
            got="probabilities with a random part set to zero",
            expected="the softmax itself as the left factor of the value product",
            edit="set the attention's dropout rate to 0 (or make it deterministic)",
        )
    if all(other.kind == "const" for other in others):
        return NoMatchError(
            "the probabilities are scaled after the softmax",
            near=True,
            got="the softmax times a constant",
            expected="the softmax itself as the left factor of the value product",
            edit="scale the values, or the result, instead of the probabilities",
        )
    return NoMatchError(
        "the probabilities are changed after the softmax",
        near=True,
        got="a product or select of the softmax with other values",
        expected="the softmax itself as the left factor of the value product",
        edit="if it is a mask, apply it to the scores, before the softmax",
    )


def _explain_denominator(reader: Reader, denominator: Expr, exponential: Expr):
    total = look(reader, denominator)
    if total.kind == "reduce" and total.name == "add":
        raise NoMatchError(
            "the softmax runs over other dimensions than the value product contracts",
            near=True,
            value=total.data[0],
            got=f"a sum over dimensions {list(total.data[4])}",
            expected="a sum over the key dimension, which the value product contracts",
            edit="take the softmax over the key axis",
        )
    raise NoMatchError(
        "the exponentials are not divided by their own sum",
        near=True,
        value=denominator.data[0] if denominator.kind in ("leaf", "reduce") else None,
        got=repr(total)[:80],
        expected="the sum of the same exponentials over the key dimension",
        edit="divide by the plain sum of the exponentials (no epsilon, no clamp)",
    )
