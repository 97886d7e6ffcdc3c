"""Polynomials in exponentials, sums and arrays: proofs that do not see spelling.

A gradient of a softmax has as many spellings as the softmax itself. All of them are
sums of products of few things: exponentials of the scores, sums of such products
over the keys, products of arrays. Written as a sum of monomials in normal form, two
spellings of one function over the real numbers are the same polynomial.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hlo_tools.matching.index_space import Atom

# A coefficient is a product of constants of the program, each rounded to its type:
# in float32 to 6e-8, and some are folded into one by the compiler passes.
RELATIVE = 1e-6
_MOST_TERMS = 64


class TooLargeError(Exception):
    """A polynomial has more terms than any gradient of an attention."""


@dataclass(frozen=True)
class Base:
    """One factor of a monomial.

    Attributes:
      kind: "expr" (an expression as it stands), "bool" (one that is 0 or 1), "applied"
        (a function without a rule, of polynomials), "exp"
        (of a sum of expressions), "sum" (of a monomial over axes), "poly".
      key: what it is, comparable: equal keys of a kind are equal functions.
      atoms: the index atoms that it varies with.
    """

    kind: str
    key: Any
    atoms: frozenset[Atom]

    def __eq__(self, other) -> bool:
        return (
            isinstance(other, Base)
            and self.kind == other.kind
            and self.key == other.key
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.key))


# (base, power) pairs; the power of a "bool" is 1
Monomial = frozenset[tuple[Base, int]]
ONE: Monomial = frozenset()


def monomial_atoms(monomial: Monomial) -> frozenset[Atom]:
    """Returns the index atoms that a monomial varies with."""
    return frozenset().union(*(base.atoms for base, _ in monomial))


def _times(left: Monomial, right: Monomial) -> Monomial:
    if not left or not right:
        return left or right
    powers: dict[Base, int] = dict(left)
    for base, power in right:
        total = powers.get(base, 0) + power
        if base.kind == "bool":
            total = min(total, 1)
        if total:
            powers[base] = total
        else:
            del powers[base]
    return frozenset(powers.items())


class Poly:
    """A sum of monomials with float coefficients; immutable."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, float]):
        self.terms = {m: c for m, c in terms.items() if c != 0.0}
        if len(self.terms) > _MOST_TERMS:
            raise TooLargeError

    @classmethod
    def const(cls, value: float) -> Poly:
        return cls({ONE: float(value)})

    @classmethod
    def of(cls, base: Base, power: int = 1) -> Poly:
        return cls({frozenset([(base, power)]): 1.0})

    def __add__(self, other: Poly) -> Poly:
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            old = terms.get(monomial, 0.0)
            total = old + coefficient
            # terms that cancel leave rounding of their coefficients
            if abs(total) <= RELATIVE * max(abs(old), abs(coefficient)):
                total = 0.0
            terms[monomial] = total
        return Poly(terms)

    def scaled(self, factor: float) -> Poly:
        return Poly({m: c * factor for m, c in self.terms.items()})

    def __neg__(self) -> Poly:
        return self.scaled(-1.0)

    def __sub__(self, other: Poly) -> Poly:
        return self + -other

    def __mul__(self, other: Poly) -> Poly:
        result = Poly({})
        for left, a in self.terms.items():
            result = result + Poly(
                {_times(left, right): a * b for right, b in other.terms.items()}
                if _distinct(left, other.terms)
                else _collected(left, a, other.terms)
            )
        return result

    def single(self) -> tuple[Monomial, float] | None:
        """Returns the only term, or None."""
        return next(iter(self.terms.items())) if len(self.terms) == 1 else None

    def inverse(self) -> Poly:
        """Returns 1 / self; a sum of several terms becomes one base."""
        found = self.single()
        if found is not None:
            monomial, coefficient = found
            if not any(base.kind == "bool" for base, _ in monomial):
                inverted = frozenset((base, -power) for base, power in monomial)
                return Poly({inverted: 1.0 / coefficient})
        key = frozenset(self.terms.items())
        return Poly.of(Base("poly", key, self.atoms), -1)

    @property
    def atoms(self) -> frozenset[Atom]:
        return frozenset().union(*(monomial_atoms(m) for m in self.terms))

    def ratio_to(self, other: Poly) -> float | None:
        """Returns r with self = r * other, or None if there is no such number."""
        if not other.terms or self.terms.keys() != other.terms.keys():
            return None
        ratios = [self.terms[m] / c for m, c in other.terms.items()]
        if any(abs(r - ratios[0]) > RELATIVE * abs(ratios[0]) for r in ratios):
            return None
        return ratios[0]

    def sum_over(self, atoms: Iterable[Atom]) -> Poly:
        """Returns the sum over every position of `atoms`.

        Factors that do not vary go outside, so that every way to take the sum in
        steps gives the same polynomial.
        """
        over = frozenset(atoms)
        result = Poly({})
        for monomial, coefficient in self.terms.items():
            result = result + _sum_monomial(monomial, over).scaled(coefficient)
        return result

    def mentions(self, base: Base) -> bool:
        """Returns whether any term has `base` as a factor, or in a sum."""
        return any(_mentions(m, base) for m in self.terms)


def _mentions(monomial: Monomial, wanted: Base) -> bool:
    for base, _ in monomial:
        if base == wanted:
            return True
        if base.kind == "sum" and _mentions(base.key[0], wanted):
            return True
        if base.kind == "poly" and any(_mentions(m, wanted) for m, _ in base.key):
            return True
        if base.kind == "applied":
            if any(_mentions(m, wanted) for arg in base.key[1] for m, _ in arg):
                return True
    return False


def _distinct(left: Monomial, terms: Mapping[Monomial, float]) -> bool:
    return len({_times(left, right) for right in terms}) == len(terms)


def _collected(left: Monomial, factor: float, terms: Mapping[Monomial, float]):
    result: dict[Monomial, float] = {}
    for right, coefficient in terms.items():
        monomial = _times(left, right)
        result[monomial] = result.get(monomial, 0.0) + factor * coefficient
    return result


def _sum_monomial(monomial: Monomial, over: frozenset[Atom]) -> Poly:
    inside = frozenset((b, p) for b, p in monomial if b.atoms & over)
    outside = monomial - inside
    varied = monomial_atoms(inside) & over
    count = 1
    for atom in over - varied:
        count *= atom.size
    if not inside:
        return Poly({outside: float(count)})
    if len(inside) == 1:
        # a sum of a sum, with nothing between: one sum over both
        ((base, power),) = inside
        if base.kind == "sum" and power == 1:
            inner, already = base.key
            return Poly({outside: float(count)}) * _sum_monomial(
                inner, varied | already
            )
    inside, varied = _flattened(inside, varied)
    base = Base("sum", (inside, varied), monomial_atoms(inside) - varied)
    return Poly({_times(outside, frozenset([(base, 1)])): float(count)})


def _flattened(inside: Monomial, varied: frozenset[Atom]):
    """Takes an inner sum apart whose axes nothing else in the outer one has."""
    for base, power in inside:
        if base.kind != "sum" or power != 1:
            continue
        inner, already = base.key
        rest = inside - {(base, power)}
        if not monomial_atoms(rest) & already:
            return _flattened(_times(rest, inner), varied | already)
    return inside, varied
