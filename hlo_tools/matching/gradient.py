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

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax.extend.mlir import ir

from hlo_tools.matching.algebra import RELATIVE, TooLargeError
from hlo_tools.matching.cotangents import GradOutput
from hlo_tools.matching.dependents import collect
from hlo_tools.matching.expressions import Expr
from hlo_tools.matching.index_space import (
    IncompatibleReshapeError,
    Index,
    atoms_of,
)
from hlo_tools.matching.operand_products import unify_sizes
from hlo_tools.matching.operands import (
    Operand,
    renamed,
    trail,
)
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.polynomials import Polynomials, derivative
from hlo_tools.matching.products import DotDims, rounds_at_most
from hlo_tools.matching.reader import (
    defining_op,
    int_array,
    is_plain_sum,
    result_index,
)
from hlo_tools.matching.recomputed import products_of, twins_of_site
from hlo_tools.matching.side_gradients import (
    SideGradients,
    functions_of,
    is_computed_from,
)
from hlo_tools.matching.visibility import guard, require_visible_keys

if TYPE_CHECKING:
    from hlo_tools.matching.attention import Attempt, AttentionMatch


@dataclass
class GradMatch:
    """A proven backward pass.

    Attributes:
      dout: the cotangent of the site's result.
      outputs: what is computed.
      members: the values that belong to it.
      block: where it stands.
      recomputes: whether it computes the scores once more.
    """

    dout: Operand
    outputs: list[GradOutput]
    members: set
    block: object
    recomputes: bool = False


def match_gradients(attempt: Attempt, match: AttentionMatch) -> list[GradMatch]:
    """Finds the backward passes of a proven site.

    Returns:
      One for each cotangent; none if the program has no gradient of the site.

    Raises:
      SplitAtomError: finer atoms are needed.
      CutError: the site has to take a part of its scores as an operand.
    """
    return _Backward(attempt, match).run()


class _Backward(SideGradients):
    def run(self) -> list[GradMatch]:
        match = self.match
        self._name_leaves()
        self.reader.origin = self.hops.origin
        starts = [(match.score.value, match.score.index), *self._scores_again()]
        self.results_again: list = []
        if len(starts) == 1:
            starts += self._scores_of_twins()
        self.again = {value for value, _ in starts[1:]}
        self.found = found = collect(self.hops, starts, {match.out})
        sums = [self.keys, self.value, match.axes.rows, ()]
        self.polynomials = Polynomials(
            self.reader, self.keys, sums, found.index, self._product
        )
        self.polynomials.contraction = self._contraction
        self.polynomials.functions = functions_of(
            [node.value for node in self._nodes if node.kind == "leaf"]
        )
        exponential = self.polynomials.exponential(match.scores)
        self.probabilities = exponential * exponential.sum_over(self.keys).inverse()
        # the cotangent is known by the products with the values
        for values in (False, True):
            for product in found.products:
                self._try(self._product_output, values, *product)
        self._side_outputs()
        match.unproven = self._unproven()
        matches = self._collected()
        if matches and self.polynomials.subtracts_logsumexp:
            try:
                require_visible_keys(match)
            except NoMatchError as error:
                match.unproven = (match.score_product, error.reason)
                return []  # rounding makes rows without keys no softmax there
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
        except (NoMatchError, TooLargeError, IncompatibleReshapeError) as error:
            # it shows as a use of the scores outside the site
            for op in arguments:
                if isinstance(op, ir.Operation | ir.OpView):
                    why = getattr(error, "reason", "an expression of too many terms")
                    self.reasons.setdefault(op.results[0], why)

    def _unproven(self) -> tuple[ir.Operation, str] | None:
        """Returns the first operation that takes a cotangent and is not proven."""
        for value in self.results_again:
            why = (
                "the result is computed once more, from saved scores or "
                "probabilities (save the result too, or neither)"
            )
            return defining_op(value).operation, why
        cotangents = set().union(*self.dots.values())
        taken = {o.value for group in self.groups.values() for o in group.outputs}
        for end in self._ends():
            if end in taken or not is_computed_from(end, cotangents):
                continue
            ways = [use.owner.operation for use in end.uses]
            known = [op for op in ways if op.results and op.results[0] in self.reasons]
            if known:
                return known[0], self.reasons[known[0].results[0]]
            if not self._gradients_behind(end, set()):
                why = self.reasons.get(end, "no gradient of a part of the scores")
                return defining_op(end).operation, why
        return None

    def _name_leaves(self) -> None:
        """Lets arrays that are saved for the backward pass go by their first name."""
        for node in self.match.scores.walk():
            if node.kind == "leaf":
                for step in trail(
                    self.reader, node.value, node.index, self.hops.origin
                ):
                    if step.scale == 1.0:
                        self.reader.aliases.setdefault((step.value, step.index), node)

    def _scores_again(self) -> list[tuple[object, Index]]:
        """Returns the score products that are computed once more, with their index."""
        match = self.match
        found: dict[object, Index] = {}
        scale = match.q.scale * match.k.scale

        def product(op, number: int, index: Index) -> None:
            result = op.results[0]
            if result == match.score.value or result in found:
                return
            dims = DotDims.of(op)
            other, fresh = self._other_index(op, dims, number, index)
            same = self._same(op.operands[1 - number], other, "q", fresh)
            own = self._same(op.operands[number], index, "k", set())
            if same is None or own is None:
                return
            _, names, factor = same
            # the same product, of the same multiples
            if abs(factor * own[2] - scale) > RELATIVE * abs(scale):
                return
            place = renamed(self._result_index(op, dims, number, index, other), names)
            if atoms_of(place) == atoms_of(match.score.index):
                found[result] = place
                self.reader.remember(result, place, match.score)

        def attempt(*arguments) -> None:
            self._try(product, *arguments)

        products_of(self.hops, self.targets["k"], attempt)
        return list(found.items())

    def _scores_of_twins(self) -> list[tuple[object, Index]]:
        """Returns the products of queries and keys that are computed once more."""
        match = self.match
        leaves = [node.value for node in match.scores.walk() if node.kind == "leaf"]
        operands = [match.q.value, match.k.value, match.v.value]
        found, self.results_again = twins_of_site(
            self.hops, match.score.value, match.value_product.results[0]
        )
        self.hops.originals = list(dict.fromkeys([*operands, *leaves]))
        for value in found:
            self.reader.remember(value, match.score.index, match.score)
        return [(value, match.score.index) for value in found]

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

    def _collected(self) -> list[GradMatch]:
        matches = []
        for key, group in self.groups.items():
            if group.dout is None or not group.outputs:
                continue
            blocks = {defining_op(o.value).operation.block for o in group.outputs}
            if len(blocks) != 1:
                continue
            dots = self.dots.get(id(key), set())
            members = group.members | dots | self.reader.expanded | self.again
            members.discard(group.dout.value)  # what makes the cotangent stays outside
            found = (group.dout, group.outputs, members, blocks.pop(), bool(self.again))
            matches.append(GradMatch(*found))
        return matches
