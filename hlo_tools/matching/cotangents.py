"""Recognizes the cotangent of a site's result, and what is computed from it.

A product of the values and the cotangent is dP. Which array the cotangent is shows
there, and every other product of the backward pass has to agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hlo_tools.matching.algebra import Base, Poly
from hlo_tools.matching.expressions import Expr
from hlo_tools.matching.index_space import (
    IncompatibleReshapeError,
    Index,
    atoms_of,
)
from hlo_tools.matching.operand_products import SiteProducts, unify_sizes
from hlo_tools.matching.operands import (
    Operand,
    Step,
    is_narrowing,
    renamed,
    trail,
    unify,
)
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.polynomials import Polynomials
from hlo_tools.matching.products import DotDims, rounds_at_most
from hlo_tools.matching.reader import (
    defining_op,
    dtype_of,
    loop_invariant,
)

if TYPE_CHECKING:
    from hlo_tools.matching.attention import Attempt, AttentionMatch


@dataclass
class GradOutput:
    """One gradient that the program computes.

    Attributes:
      wanted: "q", "k", "v" or the leaf of the scores that it is the gradient of.
      value, index: the value, and its dimensions in the site's atoms.
      factor: constant between it and the gradient of the site's operand.
    """

    wanted: str | Expr
    value: object
    index: Index
    factor: float


@dataclass
class CotangentGroup:
    """What one cotangent leads to."""

    dout: Operand | None = None
    outputs: list[GradOutput] = field(default_factory=list)
    members: set = field(default_factory=set)


class Cotangents(SiteProducts):
    """The cotangents of one site, each with what it leads to."""

    # set by the subclass, once it is known what depends on the scores
    polynomials: Polynomials
    probabilities: Poly

    def __init__(self, attempt: Attempt, match: AttentionMatch):
        super().__init__(attempt, match)
        self.groups: dict[object, CotangentGroup] = {}
        self.dots: dict[int, set] = {}  # members of the cotangent products, by node

    def _product(self, node: Expr) -> Poly | None:
        """Returns dP for a product of the values and a cotangent."""
        if node is self.match.score:
            return None
        op = defining_op(node.value)
        if not rounds_at_most(op):
            return None
        dims = DotDims.of(op)
        for v in (0, 1):
            try:
                found = self._cotangent(op, dims, v, node.index)
            except IncompatibleReshapeError:
                continue
            if found is not None:
                return found
        return self._value_product(op, dims, node)

    def _cotangent(self, op, dims: DotDims, v: int, result: Index) -> Poly | None:
        indices, fresh = self._operand_indices(op, dims, result)
        found = self._same(op.operands[v], indices[v], "v", fresh)
        if found is None or found[2] != 1.0:
            return None
        step, names, _ = found
        named = {part for dim in names.values() for part in dim}
        if named != set(self.value) or names.keys() != fresh:
            return None
        index = renamed(indices[1 - v], names)
        read = self._read_dout(op.operands[1 - v], index)
        if read is None:
            return None
        key, factors, above = read
        self.dots.setdefault(id(key), set()).update(
            (op.results[0], *step.above, *above)
        )
        return factors * Poly.of(Base("cotangent", key, self._cotangent_atoms(key)))

    def _read_dout(self, value, index: Index):
        """Returns (key of the cotangent, its factors, values in between), or None.

        The key is the array that is multiplied, but for the order of its dimensions.
        Where that was divided by the softmax's sum, the division is a factor.
        """
        steps = [
            step
            for step in trail(self.reader, value, index, self.hops.origin)
            if step.scale == 1.0 and set(self.value) <= atoms_of(step.index)
        ]
        if not steps:
            return None
        factors, above = Poly.const(1.0), steps[-1].above
        if steps[-1].value in self.polynomials.dependents:
            found = self._divided_dout(value, index)
            if found is None:
                return None
            key, factors = found
            operand = Operand(key.value, key.index)
        else:
            value, index = steps[-1].value, steps[-1].index
            key = self.reader.builder.read("leaf", value, index, dtype_of(value))
            operand = _as_multiplied(steps)
        group = self.groups.setdefault(key, CotangentGroup())
        group.dout = group.dout or operand
        return key, factors, above

    def _divided_dout(self, value, index: Index) -> tuple[Expr, Poly] | None:
        single = self.polynomials.of(self.reader.read(value, index)).single()
        if single is None:
            return None
        monomial, coefficient = single
        carrying = [(b, p) for b, p in monomial if b.atoms & set(self.value)]
        if [(b.kind, p) for b, p in carrying] != [("expr", 1)]:
            return None
        key = carrying[0][0].key
        if key.kind not in ("leaf", "dot"):
            return None
        return key, Poly({monomial - set(carrying): coefficient})

    def _same_dout(self, value, other, fresh, dout: Operand):
        """Returns (names, factors, between) if an operand is the known cotangent."""
        own = trail(self.reader, value, other, self.hops.origin)
        known = trail(self.reader, dout.value, dout.index, self.hops.origin)
        for step in own:
            for target in known:
                if step.value != target.value:
                    continue
                names = unify(step.index, target.index, fresh)
                if names is not None and fresh & atoms_of(step.index) <= names.keys():
                    factor = step.scale / target.scale
                    return names, Poly.const(factor), step.above
        names = unify_sizes([a for dim in other for a in dim if a in fresh], self.value)
        if names is None:
            return None
        read = self._read_dout(value, renamed(other, names))
        if read is None or self.groups[read[0]].dout is not dout:
            return None
        return names, read[1], read[2]

    def _cotangent_atoms(self, key):
        return (atoms_of(key.index) - set(self.value)) | (
            atoms_of(self.match.v.index) - set(self.value)
        )

    def _expected(self, key) -> Poly:
        """Returns dX for a cotangent."""
        cotangent = Poly.of(Base("cotangent", key, self._cotangent_atoms(key)))
        weighted = self.probabilities * cotangent
        return weighted - self.probabilities * weighted.sum_over(self.keys)

    def _cotangent_in(self, poly: Poly):
        """Returns the key of the one cotangent that a polynomial is linear in."""
        keys = {key for key in self.groups if self._mentions(poly, key)}
        if len(keys) > 1:
            raise NoMatchError("two cotangents in one gradient")
        return next(iter(keys), None)

    def _mentions(self, poly: Poly, key) -> bool:
        return poly.mentions(Base("cotangent", key, frozenset()))

    def _value_product(self, op, dims: DotDims, node: Expr) -> Poly | None:
        """Returns a product of something square and the values, by its factors."""
        for v in (0, 1):
            indices, fresh = self._operand_indices(op, dims, node.index)
            names = unify_sizes(
                [a for dim in indices[v] for a in dim if a in fresh], self.keys
            )
            if names is None:
                continue
            named = [renamed(index, names) for index in indices]
            if self._same(op.operands[v], named[v], "v", set()) is None:
                continue
            square = loop_invariant(op.operands[1 - v])
            if square not in self.polynomials.dependents:
                continue
            poly = self.polynomials.of(self.reader.read(square, named[1 - v]))
            key = frozenset(poly.terms.items())
            return Poly.of(Base("weighted", key, atoms_of(node.index)))
        return None

    def _contraction(self, body: Poly, axes: frozenset) -> Poly | None:
        """Sums cotangent * (square v) over the value dims: square * dP over keys."""
        if axes != frozenset(self.value):
            return None
        result = Poly({})
        for monomial, coefficient in body.terms.items():
            inside = [(b, p) for b, p in monomial if b.atoms & axes]
            rest = Poly({monomial - set(inside): coefficient})
            kinds = sorted(base.kind for base, _ in inside)
            if kinds != ["expr", "weighted"] or any(p != 1 for _, p in inside):
                return None
            square = next(b for b, _ in inside if b.kind == "weighted")
            dout = next(b for b, _ in inside if b.kind == "expr")
            if not isinstance(dout.key, Expr) or dout.key.kind != "leaf":
                return None
            cotangent = Base("cotangent", dout.key, self._cotangent_atoms(dout.key))
            weighted = Poly(dict(square.key)) * Poly.of(cotangent)
            result = result + rest * weighted.sum_over(self.keys)
        return result


def _as_multiplied(steps: list[Step]) -> Operand:
    """Returns the cotangent in the type in which it is multiplied."""
    for step in steps:
        if is_narrowing(step.value):
            return Operand(step.value, step.index)
    return Operand(steps[-1].value, steps[-1].index)
