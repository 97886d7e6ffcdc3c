"""Finds what a pattern's reference computes in a program, and proves it.

A loose comparison with the reference at its example's sizes says what the arguments
may be. The reference traced anew for these arguments is then compared strictly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools.matching.canonical import DTYPE_NAMES
from hlo_tools.matching.reader import loop_invariant
from hlo_tools.matching.unify import BudgetError, Difference, Unifier, sums_nothing
from hlo_tools.rewriting import producer, shape_of, users

_CHAIN = frozenset(
    f"stablehlo.{n}" for n in "broadcast_in_dim reshape transpose convert".split()
)
_MAX_SOLUTIONS = 24


class TracedLike(Protocol):
    """A reference as operations: the types of its arguments, and what it computes."""

    @property
    def types(self) -> Any: ...

    @property
    def outs(self) -> Any: ...


type Retrace = Callable[[list[Any]], TracedLike | None]


@dataclass
class Half:
    """The forward or the backward part of a site.

    Attributes:
      arguments: values of the program, by argument number.
      outs: number of an output -> the value of the program that it is.
      members: values that the proof went through.
    """

    arguments: dict[int, Any]
    outs: dict[int, Any] = field(default_factory=dict)
    members: set = field(default_factory=set)


def base_of(value: Any) -> Any:
    """Returns what a value only rearranges or converts."""
    value = loop_invariant(value)
    while (op := producer(value)) is not None and (
        op.name in _CHAIN or (op.name == "stablehlo.reduce" and sums_nothing(op))
    ):
        value = loop_invariant(op.operands[0])
    return value


def outward(value: Any) -> Iterator[Any]:
    """Yields a value and what is the same, rearranged or converted."""
    yield value
    for op in users(value):
        same = op.name in _CHAIN and len(op.results) == 1
        if same or (
            op.name == "stablehlo.reduce" and len(op.operands) == 2 and sums_nothing(op)
        ):
            yield from outward(op.results[0])


def between(out: Any, arguments: Iterable[Any]) -> set:
    """Returns the values that compute one from others, without these."""
    ends = {loop_invariant(value) for value in arguments}
    ends |= {base_of(value) for value in ends}
    found: set = set()
    todo = [loop_invariant(out)]
    while todo:
        value = todo.pop()
        op = producer(value)
        if op is not None and value not in ends and value not in found:
            found.add(value)
            todo += [loop_invariant(operand) for operand in op.operands]
    return found


def type_key(value: Any) -> tuple:
    """Returns shape and dtype of a value."""
    kind = ir.RankedTensorType(value.type)
    return tuple(kind.shape), DTYPE_NAMES.get(str(kind.element_type))


def size_of(out: Any) -> int:
    """Returns how many operations an output is computed by."""
    seen: set = set()
    todo = [out]
    while todo:
        value = todo.pop()
        op = producer(value)
        if op is not None and value not in seen:
            seen.add(value)
            todo += list(op.operands)
    return len(seen)


class Finder:
    """Looks for one output of a reference.

    Args:
      by_name: operations of the program by name; those of one name in order.

    Attributes:
      near: the comparison that got furthest, and the output's size.
    """

    def __init__(self, by_name: dict[str, list[ir.Operation]]):
        self.by_name = by_name
        self.near: dict[Any, tuple[Difference, int]] = {}

    def find(
        self,
        traced: TracedLike,
        number: int,
        retrace: Retrace,
        bound: dict[int, Any] | None = None,
        taken: set | None = None,
    ) -> Iterator[Half]:
        """Yields proven places of one output, at most one for each operation.

        Args:
          traced: the reference at some sizes.
          number: of the output.
          retrace: traces it for other arguments.
          bound: arguments known already.
          taken: values that belong to other sites.
        """
        base = base_of(traced.outs[number])
        op = producer(base)
        if op is None or op.name == "stablehlo.constant":
            return
        for candidate in self.by_name.get(op.name, ()):
            if taken and candidate.results[0] in taken:
                continue
            half = self._at(base, candidate.results[0], number, retrace, bound)
            if half is not None:
                yield half

    def _at(self, base, value, number, retrace, bound) -> Half | None:
        left, right = shape_of(base), shape_of(value)
        if left is None or right is None or len(left) != len(right):
            return None
        best = None
        for solution in self._loosely(base, value, bound):
            half = self.proven(solution, list(outward(value)), number, retrace)
            if half and (best is None or len(half.members) > len(best.members)):
                best = half
        return best

    def _loosely(self, base, value, bound) -> Iterator[dict[int, Any]]:
        loose = Unifier(False, bound)
        seen = set()
        try:
            for _ in loose.roots(base, value):
                key = tuple(sorted((n, hash(v)) for n, v in loose.bound.items()))
                if key not in seen:
                    seen.add(key)
                    yield dict(loose.bound)
                if len(seen) >= _MAX_SOLUTIONS:
                    return
        except BudgetError:
            return
        finally:
            if not seen:
                self.near[value] = (loose.difference, size_of(base))

    def proven(
        self, bound: dict[int, Any], roots: Sequence[Any], number: int, retrace: Retrace
    ) -> Half | None:
        """Returns the half if the reference for exactly these arguments is there."""
        traced = retrace_for(bound, retrace)
        if traced is None:
            return None
        for root in reversed(roots):
            if type_key(root) != type_key(traced.outs[number]):
                continue
            strict = Unifier(True, bound)
            try:
                for _ in strict.roots(traced.outs[number], root):
                    return Half(bound, {number: root}, between(root, bound.values()))
            except BudgetError:
                continue
            self.near.setdefault(root, (strict.difference, size_of(root)))
        return None

    def partial_sum(
        self, traced: TracedLike, number: int, retrace: Retrace, bound: dict[int, Any]
    ) -> Half | None:
        """Finds an output that is added to other terms, and gives it its own sum."""
        base = base_of(traced.outs[number])
        op = producer(base)
        if op is None or op.name != "stablehlo.add":
            return None
        for root in self.by_name.get("stablehlo.add", ()):
            value = root.results[0]
            if any(u.name == "stablehlo.add" for u in users(value)):
                continue  # not the whole sum
            if len(shape_of(value) or ()) != len(shape_of(base) or ()):
                continue
            loose = Unifier(False, bound)
            try:
                for terms in loose.some_terms(base, value):
                    solution = dict(loose.bound)
                    half = self._summed(root, terms, solution, number, retrace)
                    if half is not None:
                        return half
            except BudgetError:
                continue
        return None

    def _summed(self, root, terms, bound, number, retrace) -> Half | None:
        every = _leaves(root)
        rest = list(every)
        for term in terms:
            if term not in rest:
                return None
            rest.remove(term)
        if not rest:
            return None
        with ir.InsertionPoint(root), root.location:
            made = _sum(terms)
            half = self.proven(bound, [made], number, retrace)
            if half is None:
                return None
            total = stablehlo.AddOp(_sum(rest), made).result
        root.results[0].replace_all_uses_with(total)
        self.by_name["stablehlo.add"].append(total.owner.operation)
        return half


def _leaves(root: ir.Operation) -> list[Any]:
    found, todo = [], list(root.operands)
    while todo:
        value = todo.pop()
        op = producer(value, "stablehlo.add")
        if op is None:
            found.append(value)
        else:
            todo += list(op.operands)
    return found


def _sum(values: Sequence[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = stablehlo.AddOp(total, value).result
    return total


def retrace_for(bound: dict[int, Any], retrace: Retrace) -> TracedLike | None:
    """Returns the reference for some values, or None if it does not take them."""
    keys = [type_key(bound[n]) if n in bound else None for n in range(max(bound) + 1)]
    return retrace(keys)
