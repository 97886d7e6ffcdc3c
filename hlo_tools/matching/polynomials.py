"""Turns expressions into polynomials in normal form (see algebra.py)."""

from __future__ import annotations

import math

from hlo_tools.matching.algebra import Base, Poly
from hlo_tools.matching.expressions import Expr, is_float
from hlo_tools.matching.index_space import (
    Dim,
    IncompatibleReshapeError,
    Index,
    atoms_of,
    regroup,
)
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.reader import Reader, defining_op, shape_of
from hlo_tools.matching.softmax import strip_converts


class Polynomials:
    """Reads expressions of one site as polynomials.

    Args:
      reader: of the site.
      keys: the axes that the softmax runs over.
      sums: axes that an inner sum may run over, in order of preference.
      dependents: value -> index (or None) of what is computed from the scores; only
        these are looked into, everything else is an array as it stands.
      product: called with a "dot" node; returns its polynomial, or None.
    """

    def __init__(self, reader: Reader, keys: Dim, sums: list[Dim], dependents, product):
        self.reader, self.keys, self.sums = reader, keys, sums
        self.dependents, self.product = dependents, product
        self._memo: dict[int, Poly] = {}
        # whether an exponential of x - logsumexp(x) was met
        self.subtracts_logsumexp = False
        # values computed from what the scores depend on; looked into as well
        self.functions: set = set()
        # called with (body, axes) of a sum; may return it in another form
        self.contraction = lambda body, axes: None

    def of(self, expr: Expr) -> Poly:
        """Returns the polynomial of an expression."""
        found = self._memo.get(id(expr))
        if found is None:
            found = self._memo[id(expr)] = self._of(expr)
        return found

    def base(self, expr: Expr) -> Poly:
        """Returns an expression as it stands, as one factor."""
        return Poly.of(Base("expr", expr, expr.atoms))

    def _of(self, expr: Expr) -> Poly:
        if expr.kind == "const":
            value = float(expr.data)
            return Poly.const(value) if math.isfinite(value) else self.base(expr)
        if expr.dtype == "i1":
            return self._boolean(expr)
        if expr.kind == "op":
            return self._operation(expr)
        deeper = self.deeper(expr)
        if deeper is not None:
            return self.of(deeper)
        if expr.kind == "reduce" and expr.name == "add":
            return self._sum(expr)
        if expr.kind in ("dot", "leaf") and _is_product(expr.value):
            found = self.product(expr)
            if found is not None:
                return found
        return self.base(expr)

    def deeper(self, expr: Expr) -> Expr | None:
        """Returns what a leaf is computed by, if that depends on the scores."""
        if expr.kind != "leaf":
            return None
        op = defining_op(expr.value)
        convert = op is not None and op.operation.name == "stablehlo.convert"
        known = expr.value in self.dependents or expr.value in self.functions
        if not convert and not known:
            return None
        found = self.reader.expand(expr.value, expr.index)
        return None if found is None or found is expr else found

    def _boolean(self, expr: Expr) -> Poly:
        expr = self._looked(expr)
        if expr.kind == "op" and expr.name == "not":
            return Poly.const(1.0) - self.of(expr.args[0])
        if expr.kind == "op" and expr.name == "and":
            return self.of(expr.args[0]) * self.of(expr.args[1])
        if expr.kind == "op" and expr.name.startswith("compare."):
            if is_float(expr.args[0].dtype):
                return self.comparison(expr.name[8:], *expr.args)
        return Poly.of(Base("bool", expr, expr.atoms))

    def comparison(self, direction: str, left: Expr, right: Expr) -> Poly:
        """Returns a comparison of floats; each has one spelling (also for NaN)."""
        if direction == "NE":
            return Poly.const(1.0) - self.comparison("EQ", left, right)
        if direction == "GE" and self._sums_exponentials(left):
            if not self.of(right).terms:  # zero
                return Poly.const(1.0)
        backward = direction in ("LT", "LE")
        if backward or (direction == "EQ" and left.serial > right.serial):
            left, right = right, left
        name = {"LT": "GT", "LE": "GE"}.get(direction, direction)
        atoms = left.atoms | right.atoms
        return Poly.of(Base("bool", (name, left, right), atoms))

    def _operation(self, expr: Expr) -> Poly:
        name, args = expr.name, expr.args
        if name == "convert" and (is_float(args[0].dtype) or args[0].dtype == "i1"):
            if is_float(expr.dtype):
                return self.of(args[0])
        if not is_float(expr.dtype):
            return self.base(expr)
        if name == "add":
            return self.of(args[0]) + self.of(args[1])
        if name == "subtract":
            return self.of(args[0]) - self.of(args[1])
        if name == "negate":
            return -self.of(args[0])
        if name == "multiply":
            return self.of(args[0]) * self.of(args[1])
        if name == "divide":
            return self.of(args[0]) * self.of(args[1]).inverse()
        if name == "select":
            chosen, left, right = (self.of(arg) for arg in args)
            return chosen * left + (Poly.const(1.0) - chosen) * right
        if name == "exponential":
            return self.exponential(args[0])
        if name == "abs" and self._sums_exponentials(args[0]):
            return self.of(args[0])
        return self.applied(name, tuple(self.of(arg) for arg in args))

    def applied(self, name: str, args: tuple[Poly, ...]) -> Poly:
        """Returns an elementwise function that has no rule, as one factor."""
        key = (name, tuple(frozenset(arg.terms.items()) for arg in args))
        atoms = frozenset().union(*(arg.atoms for arg in args))
        return Poly.of(Base("applied", key, atoms))

    def exponential(self, exponent: Expr) -> Poly:
        """Returns exp of an expression: terms that are constant along the keys apart.

        So exp(x - max) is exp(x) over exp(max), and exp(x - log(sum)) a quotient.
        """
        result = Poly.const(1.0)
        varying: dict[Expr, int] = {}
        self.subtracts_logsumexp |= self._has_logsumexp(exponent)
        for sign, term in self._terms(exponent):
            if term.atoms & set(self.keys):
                varying[term] = varying.get(term, 0) + sign
            elif term.kind == "op" and term.name == "log":
                factor = self.of(self._positive(term.args[0]))
                result = result * (factor if sign > 0 else factor.inverse())
            else:
                base = Base("exp", frozenset([(term, 1)]), term.atoms)
                result = result * Poly.of(base, sign)
        if varying:
            key = frozenset((term, n) for term, n in varying.items() if n)
            atoms = frozenset().union(*(term.atoms for term, _ in key))
            result = result * Poly.of(Base("exp", key, atoms))
        return result

    def _has_logsumexp(self, expr: Expr) -> bool:
        """Returns whether a logarithm is added to something before it is subtracted.

        In a row of very low scores that loses it to rounding; subtracted by itself,
        after the maximum, it does not.
        """
        expr = self._looked(expr)
        if expr.kind != "op" or expr.name not in ("add", "subtract"):
            return False
        if expr.atoms & set(self.keys):
            bare = any(self._is_log(arg) for arg in expr.args)
            shifted = sum(not t.atoms & set(self.keys) for _, t in self._terms(expr))
            if bare and shifted < 2:
                return True
            return any(self._has_logsumexp(arg) for arg in expr.args)
        return any(self._is_log(term) for _, term in self._terms(expr))

    def _is_log(self, expr: Expr) -> bool:
        expr = self._looked(expr)
        return expr.kind == "op" and expr.name == "log"

    def _positive(self, expr: Expr) -> Expr:
        """Drops the absolute value of a sum of exponentials."""
        expr = self._looked(expr)
        if expr.kind == "op" and expr.name == "abs":
            return expr.args[0]
        return expr

    def _sums_exponentials(self, expr: Expr) -> bool:
        """Returns whether an expression is a sum of exponentials: never negative."""
        expr = self._looked(expr)
        if expr.kind != "reduce" or expr.name != "add":
            return False
        _, _, operand, inner, dims = expr.data
        index = self._summed_index(operand, inner, sorted(dims))
        if index is None:
            return False
        body = self._looked(self.reader.read(operand, index))
        return body.kind == "op" and body.name == "exponential"

    def _looked(self, expr: Expr) -> Expr:
        expr = strip_converts(expr)
        while (deeper := self.deeper(expr)) is not None:
            expr = strip_converts(deeper)
        return expr

    def _terms(self, expr: Expr, sign: int = 1) -> list[tuple[int, Expr]]:
        expr = self._looked(expr)
        if expr.kind == "op" and expr.name in ("add", "subtract"):
            left, right = expr.args
            other = sign if expr.name == "add" else -sign
            return self._terms(left, sign) + self._terms(right, other)
        if expr.kind == "op" and expr.name == "negate":
            return self._terms(expr.args[0], -sign)
        return [(sign, expr)]

    def _sum(self, expr: Expr) -> Poly:
        _, _, operand, inner, dims = expr.data
        if expr.value not in self.dependents and operand not in self.dependents:
            return self.base(expr)
        dims = sorted(dims)
        index = self._summed_index(operand, inner, dims)
        if index is None:
            return self.base(expr)
        body = self.of(self.reader.read(operand, index))
        axes = frozenset(a for dim in dims for a in index[dim])
        return self.contraction(body, axes) or body.sum_over(axes)

    def _summed_index(self, operand, inner: Index, dims) -> Index | None:
        """Names the axes that a sum runs over."""
        known = self.dependents.get(operand)
        if known is not None:
            known = tuple(self.reader.space.expand(dim) for dim in known)
            if all(n in dims or known[n] == dim for n, dim in enumerate(inner)):
                return known
        sizes = [shape_of(operand)[dim] for dim in dims]
        for axes in self.sums:
            if set(axes) & atoms_of(inner) or (not axes and math.prod(sizes) != 1):
                continue
            try:
                parts = regroup((axes,), sizes)
            except IncompatibleReshapeError:
                continue
            index = list(inner)
            for dim, part in zip(dims, parts, strict=True):
                index[dim] = part
            return tuple(index)
        return None


def _is_product(value) -> bool:
    op = defining_op(value)
    return op is not None and op.operation.name == "stablehlo.dot_general"


def derivative(polynomials: Polynomials, expr: Expr, by: Expr) -> Poly:
    """Returns the derivative of an expression by one of its nodes.

    Conditions of selects count as constants, as automatic differentiation has them.

    Raises:
      NoMatchError: an operation on the way has no rule.
    """
    memo: dict[int, Poly] = {}
    one, zero = Poly.const(1.0), Poly({})

    def visit(node: Expr) -> Poly:
        if id(node) not in memo:
            memo[id(node)] = one if node is by else rule(node)
        return memo[id(node)]

    def rule(node: Expr) -> Poly:
        if node.kind == "reduce" and node.value in polynomials.dependents:
            raise NoMatchError("the scores depend on a sum of scores")
        if node.kind != "op" or node.dtype == "i1":
            return zero
        name, args = node.name, node.args
        parts = [visit(arg) for arg in args]
        if not any(part.terms for part in parts):
            return zero
        of = polynomials.of
        if name == "convert":
            return parts[0]
        if name == "add":
            return parts[0] + parts[1]
        if name == "subtract":
            return parts[0] - parts[1]
        if name == "negate":
            return -parts[0]
        if name == "multiply":
            return parts[0] * of(args[1]) + of(args[0]) * parts[1]
        if name == "divide":
            inverse = of(args[1]).inverse()
            return (parts[0] - of(node) * parts[1]) * inverse
        if name == "select":
            chosen = of(args[0])
            return chosen * parts[1] + (one - chosen) * parts[2]
        if name in ("maximum", "minimum"):
            return _chosen(polynomials, name, args, parts)
        return parts[0] * _slope(polynomials, name, node)

    return visit(expr)


def _chosen(polynomials: Polynomials, name: str, args, parts) -> Poly:
    """Returns the derivative of a maximum or minimum, which two equals share."""
    direction = "GT" if name == "maximum" else "LT"
    equal, result = polynomials.comparison("EQ", *args), Poly({})
    for (one, other), part in zip((args, args[::-1]), parts, strict=True):
        wins = polynomials.comparison(direction, one, other)
        shared = (Poly.const(1.0) - wins) * equal
        result = result + (wins + shared.scaled(0.5)) * part
    return result


def _slope(polynomials: Polynomials, name: str, node: Expr) -> Poly:
    """Returns the derivative of an elementwise function of one argument."""
    value, one = polynomials.of(node), Poly.const(1.0)
    argument = polynomials.of(node.args[0])
    if name == "tanh":
        return one - value * value
    if name == "logistic":
        return value * (one - value)
    if name == "exponential":
        return value
    if name == "sine":
        return polynomials.applied("cosine", (argument,))
    if name == "cosine":
        return -polynomials.applied("sine", (argument,))
    if name == "log":
        return argument.inverse()
    if name == "sqrt":
        return value.inverse().scaled(0.5)
    raise NoMatchError(f"the gradient of stablehlo.{name} of the scores has no rule")
