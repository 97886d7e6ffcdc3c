"""Proves the backward pass of an attention site.

With P = softmax(X(S)), O = P v and a cotangent dO of O, the gradients are

    dP = dO v^T      dX = P * (dP - sum_keys P * dP)      dS = dX * dX/dS
    dv = P^T dO      dq = dS k      dk = dS^T q      dside = sum dX * dX/dside

A program spells them in many ways. Each product or sum that uses a value computed
from the scores is read as a polynomial and compared with these, over the real
numbers and term by term; the other operand of each product must be the site's own
q, k, v or the one cotangent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hlo_tools.matching.algebra import Base, Poly, TooLargeError
from hlo_tools.matching.dependents import Dependents, collect
from hlo_tools.matching.expressions import Expr, is_float
from hlo_tools.matching.hops import Hops
from hlo_tools.matching.index_space import (
    Dim,
    IncompatibleReshapeError,
    Index,
    atoms_of,
    dim_size,
)
from hlo_tools.matching.operands import (
    Operand,
    Step,
    is_narrowing,
    renamed,
    trail,
    unify,
)
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.polynomials import Polynomials, derivative
from hlo_tools.matching.products import DotDims, rounds_at_most
from hlo_tools.matching.reader import (
    defining_op,
    int_array,
    is_plain_sum,
    loop_invariant,
    result_index,
    shape_of,
    table_of,
)
from hlo_tools.matching.visibility import guard

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
class GradMatch:
    """A proven backward pass.

    Attributes:
      dout: the cotangent of the site's result.
      outputs: what is computed.
      members: the values that belong to it.
      block: where it stands.
    """

    dout: Operand
    outputs: list[GradOutput]
    members: set
    block: object


@dataclass
class _Group:
    """What one cotangent leads to."""

    dout: Operand | None = None
    outputs: list[GradOutput] = field(default_factory=list)
    members: set = field(default_factory=set)


def match_gradients(attempt: Attempt, match: AttentionMatch) -> list[GradMatch]:
    """Finds the backward passes of a proven site.

    Returns:
      One for each cotangent; none if the program has no gradient of the site.

    Raises:
      SplitAtomError: finer atoms are needed.
    """
    return _Backward(attempt, match).run()


class _Backward:
    def __init__(self, attempt: Attempt, match: AttentionMatch):
        self.attempt, self.match = attempt, match
        self.space, self.reader = attempt.space, attempt.reader
        self.hops = Hops()
        self.groups: dict[object, _Group] = {}
        axes = match.axes
        self.keys, self.value = axes.keys, axes.value
        self.all_atoms = frozenset(
            atom
            for dim in (axes.batch, axes.kv_heads, axes.group, axes.rows, axes.keys)
            for atom in dim
        )
        self.dots: dict[int, set] = {}  # members of the cotangent products, by node

    def run(self) -> list[GradMatch]:
        match = self.match
        self._name_leaves()
        self.reader.origin = self.hops.origin
        stop = set() if match.out is None else {match.out}
        found = collect(self.hops, match.score.value, match.score.index, stop)
        self.targets = {
            name: trail(self.reader, operand.value, operand.index, self.hops.origin)
            for name, operand in (("q", match.q), ("k", match.k), ("v", match.v))
        }
        sums = [self.keys, self.value, match.axes.rows, ()]
        self.polynomials = Polynomials(
            self.reader, self.keys, sums, found.index, self._product
        )
        self.polynomials.contraction = self._contraction
        exponential = self.polynomials.exponential(match.scores)
        self.probabilities = exponential * exponential.sum_over(self.keys).inverse()
        # the cotangent is known by the products with the values
        for values in (False, True):
            for product in found.products:
                self._try(self._product_output, values, *product)
        self._side_outputs(found)
        matches = self._collected()
        may_be_empty = not match.rows_never_empty and not match.guarded
        if matches and match.pieces.named and may_be_empty:
            self._check_empty_rows(matches)
        return matches

    def _check_empty_rows(self, matches: list[GradMatch]) -> None:
        """Guards the names where rows without keys would get another gradient.

        The softmax of such a row is uniform. A select stops its gradient at the masked
        scores, as the named form does; an added mask lets it through.
        """
        match = self.match
        leaves = [o.wanted for m in matches for o in m.outputs]
        nodes = [match.score, *(leaf for leaf in leaves if isinstance(leaf, Expr))]
        masks = [self.polynomials.of(mask) for mask in match.pieces.masks]
        for node in nodes:
            slope = derivative(self.polynomials, match.scores, node)
            if any((slope * mask - slope).terms for mask in masks):
                why = "a row without visible keys passes its gradient to masked scores"
                guard(match, why)
                return

    def _try(self, method, *arguments) -> None:
        try:
            method(*arguments)
        except (NoMatchError, TooLargeError, IncompatibleReshapeError):
            return  # it shows as a use of the scores outside the site

    def _name_leaves(self) -> None:
        """Lets arrays that are saved for the backward pass go by their first name."""
        for node in self.match.scores.walk():
            if node.kind == "leaf":
                for step in trail(
                    self.reader, node.value, node.index, self.hops.origin
                ):
                    if step.scale == 1.0:
                        self.reader.aliases.setdefault((step.value, step.index), node)

    # ----------------------------------------------------------- the cotangent

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

    def _operand_indices(self, op, dims: DotDims, result: Index):
        """Returns the indices of a product's operands; contracted dims are fresh."""
        shapes = [shape_of(operand) for operand in op.operands]
        index: list[list[Dim]] = [[()] * len(shape) for shape in shapes]
        rest = iter(result)
        for left, right in zip(*dims.batch, strict=True):
            index[0][left] = index[1][right] = next(rest)
        for number in (0, 1):
            for dim in dims.free(number, len(shapes[number])):
                index[number][dim] = next(rest)
        fresh: set = set()
        for left, right in zip(*dims.contract, strict=True):
            dim = self._fresh(op, 0, left, shapes[0][left])
            fresh |= set(dim)
            index[0][left] = index[1][right] = dim
        return [tuple(one) for one in index], fresh

    def _fresh(self, op, number: int, dim: int, size: int) -> Dim:
        return self.space.expand(self.attempt.named_dim(op, number, dim, size))

    def _same(self, value, index: Index, name: str, fresh: set):
        """Returns (step, names of fresh atoms, scale) if an operand is the site's."""
        own = trail(self.reader, value, index, self.hops.origin)
        for step in own:
            for target in self.targets[name]:
                if step.value != target.value:
                    continue
                names = unify(step.index, target.index, fresh)
                if names is not None and fresh & atoms_of(step.index) <= names.keys():
                    return step, names, step.scale / target.scale
        return None

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
        """Returns (key of the cotangent, its factors, values in between), or None."""
        poly = self.polynomials.of(self.reader.read(value, index))
        single = poly.single()
        if single is None:
            return None
        monomial, coefficient = single
        carrying = [(b, p) for b, p in monomial if b.atoms & set(self.value)]
        if len(carrying) > 1 or any(p != 1 or b.kind != "expr" for b, p in carrying):
            return None
        rest = Poly({monomial - set(carrying): coefficient})
        key: object = "constant"
        if carrying:
            key = carrying[0][0].key
        elif monomial:
            return None
        steps = trail(self.reader, value, index, self.hops.origin)
        group = self.groups.setdefault(key, _Group())
        if group.dout is None:
            group.dout = self._dout_operand(key, value, index, steps)
        if group.dout is None:
            return None
        if key == "constant":
            ratio = coefficient / group.dout.scale
            rest = Poly.const(ratio)
        return key, rest, ()

    def _dout_operand(self, key, value, index: Index, steps: list[Step]):
        if key == "constant":
            expr = self.reader.read(value, index)
            if expr.kind != "const" or not float(expr.data):
                return None
            return Operand(value, index, float(expr.data))
        assert isinstance(key, Expr)
        best = Operand(steps[0].value, steps[0].index)
        for step in steps:
            if step.scale != 1.0:
                break
            best = Operand(step.value, step.index)
            if step.value == key.value or is_narrowing(step.value):
                return best  # as it is multiplied, but for the order of dimensions
        return Operand(key.value, key.index)

    # ------------------------------------------------------------- the outputs

    def _expected(self, key) -> Poly:
        """Returns dX for a cotangent."""
        cotangent = Poly.of(Base("cotangent", key, self._cotangent_atoms(key)))
        weighted = self.probabilities * cotangent
        return weighted - self.probabilities * weighted.sum_over(self.keys)

    def _cotangent_atoms(self, key):
        if key == "constant":
            return frozenset(self.keys) | frozenset(
                atoms_of(self.match.v.index) - set(self.value)
            )
        return (atoms_of(key.index) - set(self.value)) | (
            atoms_of(self.match.v.index) - set(self.value)
        )

    def _product_output(self, values: bool, op, number: int, index: Index) -> None:
        index = tuple(self.space.expand(dim) for dim in index)
        if not set(self.keys) <= atoms_of(index):
            return
        if self.match.out is not None and op.results[0] == self.match.value_product:
            return
        if not rounds_at_most(op):
            return
        poly = self.polynomials.of(self.reader.read(op.operands[number], index))
        key = self._cotangent_in(poly)
        if values != (key is None):
            return
        dims = DotDims.of(op)
        contracted = {a for d in dims.contract[number] for a in index[d]}
        other, fresh = self._other_index(op, dims, number, index)
        value = op.operands[1 - number]
        result = self._result_index(op, dims, number, index, other)
        if key is None:
            if contracted >= set(self.keys):
                return
            self._values_gradient(op, poly, value, other, fresh, result)
            return
        wanted, name = ("q", "k") if contracted & set(self.keys) else ("k", "q")
        found = self._same(value, other, name, fresh)
        if found is None:
            raise NoMatchError(f"not the gradient with respect to {wanted}")
        step, names, scale = found
        match = self.match
        by_score = derivative(self.polynomials, match.scores, match.score)
        ratio = poly.ratio_to(self._expected(key) * by_score)
        if ratio is None:
            raise NoMatchError("not the gradient of the softmax")
        # the other operand is a multiple of the site's array, whose scale is a part
        # of the site's
        factor = ratio * scale / (match.q.scale * match.k.scale)
        self._finish(key, wanted, op, renamed(result, names), factor, step.above)

    def _values_gradient(self, op, poly, value, other, fresh, result) -> None:
        atoms = [a for dim in other for a in dim if a in fresh]
        group_key = None
        for key, group in list(self.groups.items()):
            if group.dout is None:
                continue
            found = self._same_dout(value, other, fresh, group.dout)
            if found is not None:
                group_key, names, factors, above = key, *found
                break
        else:
            # no gradient but this one: the cotangent is whatever is multiplied
            names = unify_sizes(atoms, self.value)
            if names is None:
                raise NoMatchError("the values' gradient has other sizes")
            read = self._read_dout(value, renamed(other, names))
            if read is None:
                raise NoMatchError("the values' gradient has no single cotangent")
            group_key, factors, above = read
        ratio = (poly * factors).ratio_to(self.probabilities)
        if ratio is None:
            raise NoMatchError("not the gradient with respect to v")
        self._finish(group_key, "v", op, renamed(result, names), ratio, above)

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

    def _other_index(self, op, dims: DotDims, number: int, index: Index):
        """Returns the index of the other operand; its free dims are fresh."""
        shape = shape_of(op.operands[1 - number])
        other: list[Dim] = [()] * len(shape)
        for pairs in (dims.batch, dims.contract):
            for ours, theirs in zip(pairs[number], pairs[1 - number], strict=True):
                other[theirs] = index[ours]
        fresh: set = set()
        for dim in dims.free(1 - number, len(shape)):
            other[dim] = self._fresh(op, 1 - number, dim, shape[dim])
            fresh |= set(other[dim])
        return tuple(other), fresh

    def _result_index(self, op, dims: DotDims, number, index, other) -> Index:
        sides = [index, other] if number == 0 else [other, index]
        found = [sides[0][d] for d in dims.batch[0]]
        for side in (0, 1):
            free = dims.free(side, len(shape_of(op.operands[side])))
            found.extend(sides[side][d] for d in free)
        return tuple(found)

    def _cotangent_in(self, poly: Poly):
        """Returns the key of the one cotangent that a polynomial is linear in."""
        keys = {key for key in self.groups if self._mentions(poly, key)}
        if len(keys) > 1:
            raise NoMatchError("two cotangents in one gradient")
        return next(iter(keys), None)

    def _mentions(self, poly: Poly, key) -> bool:
        return poly.mentions(Base("cotangent", key, frozenset()))

    def _finish(self, key, wanted, op, index: Index, factor, above) -> None:
        """Follows a product's result until it has the operand's own axes."""
        operand = getattr(self.match, wanted)
        target = atoms_of(operand.index)
        value, between = op.results[0], []
        while atoms_of(index) != target:
            uses = list(value.uses)
            if len(uses) != 1:
                raise NoMatchError(f"the gradient of {wanted} has other axes")
            user = uses[0].owner.operation
            if user.name == "stablehlo.reduce":
                if not is_plain_sum(user):
                    raise NoMatchError(f"the gradient of {wanted} is reduced otherwise")
                dims = int_array(user.attributes["dimensions"])
                moved = tuple(dim for n, dim in enumerate(index) if n not in dims)
                if {a for n in dims for a in index[n]} & target:
                    raise NoMatchError(f"the gradient of {wanted} is summed too far")
            else:
                moved = result_index(user, index)
                if moved is None:
                    raise NoMatchError(f"the gradient of {wanted} has other axes")
            value, index = user.results[0], moved
            between.append(value)
        group = self.groups[key]
        if any(o.wanted == wanted for o in group.outputs):
            raise NoMatchError(f"the gradient of {wanted} is computed twice")
        group.outputs.append(GradOutput(wanted, value, index, factor))
        group.members |= {op.results[0], *between, *above}

    # --------------------------------------------------------- side gradients

    def _side_leaves(self) -> list[Expr]:
        return [
            node
            for node in self.match.scores.walk()
            if node.kind == "leaf"
            and is_float(node.dtype)
            and table_of(node.value) is None
        ]

    def _side_outputs(self, found: Dependents) -> None:
        leaves = self._side_leaves()
        if not leaves:
            return
        candidates = list(found.exits)
        for value, index in found.index.items():
            op = defining_op(value)
            if index is not None and op.operation.name == "stablehlo.reduce":
                candidates.append((value, index))
        seen: set = set()
        for value, index in candidates:
            if value not in seen and value != self.match.out:
                seen.add(value)
                self._try(self._side_output, leaves, value, index)

    def _side_output(self, leaves, value, index: Index) -> None:
        index = tuple(self.space.expand(dim) for dim in index)
        atoms = atoms_of(index)
        fitting = [leaf for leaf in leaves if atoms_of(leaf.index) == atoms]
        if not fitting:
            return
        poly = self.polynomials.of(self.reader.read(value, index))
        key = self._cotangent_in(poly)
        if key is None:
            return
        group = self.groups[key]
        for leaf in fitting:
            by_leaf = derivative(self.polynomials, self.match.scores, leaf)
            whole = self._expected(key) * by_leaf
            ratio = poly.ratio_to(whole.sum_over(self.all_atoms - atoms))
            if ratio is None or any(o.wanted is leaf for o in group.outputs):
                continue
            group.outputs.append(GradOutput(leaf, value, index, ratio))
            group.members.add(value)
            return

    # ------------------------------------------------------------- the result

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
            if dout.key not in self.groups:
                return None
            cotangent = Base("cotangent", dout.key, self._cotangent_atoms(dout.key))
            weighted = Poly(dict(square.key)) * Poly.of(cotangent)
            result = result + rest * weighted.sum_over(self.keys)
        return result

    def _collected(self) -> list[GradMatch]:
        matches = []
        for key, group in self.groups.items():
            if group.dout is None or not group.outputs:
                continue
            blocks = {defining_op(o.value).operation.block for o in group.outputs}
            if len(blocks) != 1:
                continue
            dots = self.dots.get(id(key), set())
            members = group.members | dots | self.reader.expanded
            matches.append(GradMatch(group.dout, group.outputs, members, blocks.pop()))
        return matches


def unify_sizes(fresh: list, known: Dim):
    """Names fresh atoms, in order, after the atoms of a dimension.

    Raises:
      SplitAtomError: one of them stands for several.
    """
    if dim_size(tuple(fresh)) != dim_size(known):
        return None
    return unify((tuple(fresh),), (known,), set(fresh))
