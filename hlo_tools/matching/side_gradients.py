"""Finds the gradients of what the scores depend on beside queries and keys.

A bias may be gathered from a table, masked, or be a product of its own; whatever the
program does with its gradient afterwards (a scatter, a product with one-hot rows) is
no part of the site. So the search goes backward from the values that are used outside
of it, to the first one on each way that is such a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hlo_tools.matching.algebra import Poly, TooLargeError
from hlo_tools.matching.cotangents import Cotangents, GradOutput
from hlo_tools.matching.dependents import Dependents
from hlo_tools.matching.expressions import Expr, is_float
from hlo_tools.matching.hops import BARRIER, READ
from hlo_tools.matching.index_space import IncompatibleReshapeError, atoms_of
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.polynomials import derivative
from hlo_tools.matching.reader import (
    ELEMENTWISE,
    SHAPE_OPS,
    defining_op,
    loop_invariant,
    result_number,
    table_of,
)

if TYPE_CHECKING:
    from hlo_tools.matching.attention import Attempt, AttentionMatch

_PASSED = ELEMENTWISE | SHAPE_OPS | {"stablehlo.reduce", BARRIER, READ}
_LEAVES = ("leaf", "dot", "reduce")
_MOST_VALUES = 200


class CutError(Exception):
    """The site has to take a value of its side as an operand, not look into it.

    Attributes:
      value: the value.
    """

    def __init__(self, value):
        super().__init__("a gradient with respect to a part of the scores")
        self.value = value


class SideGradients(Cotangents):
    """The gradients of the sides of one site."""

    found: Dependents  # set by the subclass
    again: set

    def __init__(self, attempt: Attempt, match: AttentionMatch):
        super().__init__(attempt, match)
        self.reasons: dict[object, str] = {}  # why a value is no gradient
        self._nodes = self._side_nodes()
        self._proven: dict[object, tuple[object, GradOutput] | None] = {}
        self._slopes: dict[int, Poly] = {}

    def _side_outputs(self) -> None:
        """Adds the gradients of sides to the groups of their cotangents.

        Raises:
          CutError: one is that of a part of the scores which is computed.
        """
        if not self._nodes:
            return
        for value in self._ends():
            try:
                behind = self._gradients_behind(value, set())
            except NoMatchError:  # slots of a loop that do not go together
                continue
            self._take(behind)

    def _side_nodes(self) -> list[Expr]:
        """Returns the parts of the scores without a score, operands first."""
        holds: dict[int, bool] = {}
        match = self.match

        def holds_score(node: Expr) -> bool:
            if id(node) not in holds:
                parts = [holds_score(arg) for arg in node.args]
                holds[id(node)] = node is match.score or any(parts)
            return holds[id(node)]

        nodes = [
            node
            for node in match.scores.walk()
            if not holds_score(node)
            and is_float(node.dtype)
            and (node.kind == "op" or node.kind in _LEAVES)
            and not (node.kind == "leaf" and table_of(node.value) is not None)
        ]
        return sorted(nodes, key=lambda n: (n.kind == "op", n.serial))

    def _ends(self) -> list:
        """Returns the values that something outside of the site uses."""
        inside = {self.match.value_product.results[0], *self.again}
        for key, group in self.groups.items():
            inside |= group.members | self.dots.get(id(key), set())
        ends = [value for value, _ in self.found.exits]
        for op, number, _ in self.found.products:
            if op.results[0] not in inside:
                ends.append(op.operands[number])
        return list(dict.fromkeys(ends))

    def _gradients_behind(self, value, seen: set) -> list:
        """Returns the gradients that a value is computed from, and nothing else."""
        proven = self._proof(value)
        if proven is not None:
            return [proven]
        seen.add(value)
        op = defining_op(value)
        if op is None or op.operation.name not in _PASSED or value == self.match.out:
            return []
        operands = list(op.operands)
        if op.operation.name == BARRIER:
            operands = [operands[result_number(value)]]
        elif op.operation.name == READ:
            operands = [self.hops.origin(value)]
        result = []
        for operand in operands:
            operand = loop_invariant(operand)
            if operand not in self.found.index or operand in seen:
                continue
            behind = self._gradients_behind(operand, seen)
            if not behind:
                return []
            result += behind
        return result

    def _proof(self, value) -> tuple[object, GradOutput] | None:
        if value not in self._proven:
            self._proven[value] = None  # until it is known
            try:
                self._proven[value] = self._prove(value)
            except (NoMatchError, TooLargeError, IncompatibleReshapeError) as error:
                # it shows as a use of the scores outside the site
                if isinstance(error, NoMatchError):
                    self.reasons.setdefault(value, error.reason)
        return self._proven[value]

    def _prove(self, value) -> tuple[object, GradOutput] | None:
        """Returns (key of the cotangent, gradient) if a value is a side's gradient."""
        index = self.found.index.get(value)
        if index is None or value == self.match.out:
            return None
        index = tuple(self.space.expand(dim) for dim in index)
        atoms = atoms_of(index)
        fitting = [node for node in self._nodes if node.atoms == atoms]
        if not fitting:
            return None
        poly = self.polynomials.of(self.reader.read(value, index))
        key = self._cotangent_in(poly)
        if key is None:
            return None
        for node in fitting:
            whole = self._expected(key) * self._slope_by(node)
            ratio = poly.ratio_to(whole.sum_over(self.all_atoms - atoms))
            if ratio is not None:
                return key, GradOutput(node, value, index, ratio)
        return None

    def _slope_by(self, node: Expr) -> Poly:
        if id(node) not in self._slopes:
            slope = derivative(self.polynomials, self.match.scores, node)
            self._slopes[id(node)] = slope
        return self._slopes[id(node)]

    def _take(self, proven: list) -> None:
        for key, output in proven:
            if output.wanted.kind == "op":
                value = self._value_of(output.wanted)
                if value is not None:
                    raise CutError(value)
                continue
            group = self.groups[key]
            if not any(o.wanted is output.wanted for o in group.outputs):
                group.outputs.append(output)
                group.members.add(output.value)

    def _value_of(self, node: Expr):
        """Returns the array that a part of the scores is, if it may be an operand."""
        value = self.reader.value_of(node)
        done = value in self.attempt.uncut or value in self.attempt.cuts
        return None if done else value


def is_computed_from(value, sources: set) -> bool:
    """Returns whether a value depends on one of others, in one block."""
    seen: set = set()
    pending = [value]
    while pending and len(seen) < 10 * _MOST_VALUES:
        value = pending.pop()
        if value in sources:
            return True
        op = defining_op(value)
        if op is not None and value not in seen:
            seen.add(value)
            pending.extend(op.operands)
    return False


def functions_of(values: list) -> set:
    """Returns everything that is computed from some values and constants alone."""
    found: set = set()
    pending = list(values)
    known = set(values)
    while pending and len(found) < _MOST_VALUES:
        for use in pending.pop().uses:
            op = use.owner.operation
            if op.name not in ELEMENTWISE | SHAPE_OPS or op.results[0] in known:
                continue
            if all(o in known or _is_constant(o) for o in op.operands):
                found.add(op.results[0])
                known.add(op.results[0])
                pending.append(op.results[0])
    return found


def _is_constant(value) -> bool:
    op = defining_op(value)
    return op is not None and op.operation.name == "stablehlo.constant"
