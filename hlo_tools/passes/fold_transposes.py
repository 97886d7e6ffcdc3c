"""Folds transposes into dot products, into each other, and through elementwise ops.

Every rewrite keeps each element's value and computes it with the same operations;
only the order in which elements are laid out changes. A rewrite is made when fewer
transposes are left, counted by planning it first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools.rewriting import (
    ELEMENTWISE,
    Match,
    Rewriter,
    element_type,
    int_list,
    inverse,
    is_identity,
    is_plain,
    permuted,
    producer,
    rewrite,
    shape_of,
    single_user,
    splat_attribute,
    tensor_type,
)

_TRANSPOSE = "stablehlo.transpose"
# Bounds the search above one transpose; real chains are a handful of operations.
_MAX_TREE = 64
# The cost of what can not be done.
_NEVER = 1_000_000


@dataclass(frozen=True)
class _Plan:
    """How to make a permuted copy of a value.

    Attributes:
      cost: how many transposes there are more (or, negative, fewer) afterwards.
      build: makes the value.
    """

    cost: int
    build: Callable[[Rewriter], ir.Value]


class _Planner:
    """Plans permuted copies of the values above one operation.

    Args:
      root: the operation in front of which they would be made.
    """

    def __init__(self, root: ir.Operation):
        self.block = root.block
        self.fuel = _MAX_TREE

    def plan(self, value: ir.Value, perm: tuple[int, ...]) -> _Plan:
        """Returns the cheapest way to make transpose(value, perm)."""
        if is_identity(perm):
            return _Plan(0, lambda rewriter: value)
        if shape_of(value) is None:
            return _Plan(_NEVER, lambda rewriter: value)
        self.fuel -= 1
        op = producer(value)
        if op is not None and self.fuel > 0 and is_plain(op):
            if op.name == _TRANSPOSE:
                return self._compose(op, perm)
            if op.name == "stablehlo.broadcast_in_dim":
                return self._broadcast(op, perm)
            if op.name in ("stablehlo.constant", "stablehlo.iota"):
                if (found := _permuted_source(op, perm)) is not None:
                    return found
            if op.name in ELEMENTWISE and op.block == self.block:
                if single_user(value) is not None:
                    return self.elementwise(op, perm)
        return _Plan(1, lambda rewriter: rewriter.transpose(value, perm))

    def _compose(self, op: ir.Operation, perm: tuple[int, ...]) -> _Plan:
        source = op.operands[0]
        both = permuted(int_list(op, "permutation"), perm)
        dies = -1 if single_user(op.results[0]) is not None else 0
        if is_identity(both):
            return _Plan(dies, lambda rewriter: source)
        return _Plan(1 + dies, lambda rewriter: rewriter.transpose(source, both))

    def _broadcast(self, op: ir.Operation, perm: tuple[int, ...]) -> _Plan:
        source = op.operands[0]
        where = inverse(perm)
        dims = [where[d] for d in int_list(op, "broadcast_dimensions")]
        # XLA wants broadcast dimensions in order: sort them in the (smaller) source.
        order = tuple(sorted(range(len(dims)), key=dims.__getitem__))
        inner = self.plan(source, order)
        shape = permuted(op.results[0].type.shape, perm)

        def build(rewriter: Rewriter) -> ir.Value:
            return rewriter.broadcast(inner.build(rewriter), shape, sorted(dims))

        return _Plan(inner.cost, build)

    def elementwise(self, op: ir.Operation, perm: tuple[int, ...]) -> _Plan:
        operands = list(op.operands)
        shape = permuted(op.results[0].type.shape, perm)
        plans: dict[ir.Value, _Plan] = {}
        for value in operands:
            if value not in plans:
                plans[value] = self.operand(value, perm)

        def build(rewriter: Rewriter) -> ir.Value:
            made = {value: plan.build(rewriter) for value, plan in plans.items()}
            return rewriter.with_operands(op, [made[v] for v in operands], shape)

        return _Plan(sum(plan.cost for plan in plans.values()), build)

    def operand(self, value: ir.Value, perm: tuple[int, ...]) -> _Plan:
        """Plans an operand of an elementwise operation; scalars stay scalars."""
        if len(value.type.shape) == 0:
            return _Plan(0, lambda rewriter: value)
        return self.plan(value, perm)


def _permuted_source(op: ir.Operation, perm: tuple[int, ...]) -> _Plan | None:
    """Plans a permuted iota or splat constant: no transpose at all."""
    result = op.results[0]
    shape, element = permuted(result.type.shape, perm), element_type(result)
    if op.name == "stablehlo.iota":
        dim = perm.index(op.attributes["iota_dimension"].value)
        return _Plan(0, lambda rewriter: rewriter.iota(shape, element, dim))
    number = splat_attribute(result)
    if number is None:
        return None
    return _Plan(0, lambda rewriter: rewriter.splat(number, shape, element))


def hoist_transpose(op: ir.Operation) -> Match | str | None:
    """Makes what is above a transpose in permuted order, if that saves one."""
    if shape_of(op.results[0]) is None:
        return "dynamic or quantized shape"
    if not is_plain(op):
        return "the transpose has attributes that would be lost"
    perm = int_list(op, "permutation")
    source = op.operands[0]
    above = producer(source)
    plan = _Planner(op).plan(source, perm)
    saved = 1 - plan.cost
    direct = above is not None and above.name == _TRANSPOSE and is_plain(above)
    if is_identity(perm) or saved > 0 or (saved == 0 and direct):
        return Match(op, plan.build)
    if saved == 0 and above is not None and _widens(above):
        return Match(op, plan.build)
    return None


def _widens(op: ir.Operation) -> bool:
    """Returns whether `op` is a broadcast of something with fewer elements."""
    if op.name != "stablehlo.broadcast_in_dim" or not is_plain(op):
        return False
    shape = op.operands[0].type.shape
    return math.prod(shape) < math.prod(op.results[0].type.shape)


def sink_transpose(op: ir.Operation) -> Match | str | None:
    """Puts one transpose after an elementwise op instead of several before it."""
    below = single_user(op.results[0])
    if below is None or below.name not in ELEMENTWISE or below.block != op.block:
        return None
    if len(below.operands) < 2 or shape_of(below.results[0]) is None:
        return None
    if not (is_plain(op) and is_plain(below)):
        return "the transpose or its user has attributes that would be lost"
    perm = int_list(op, "permutation")
    back = inverse(perm)
    plan = _Planner(below).elementwise(below, back)
    if plan.cost + 1 >= 0:
        return None
    return Match(below, lambda rw: rw.transpose(plan.build(rw), perm))


# ----------------------------------------------------------------- dot_general


@dataclass(frozen=True)
class _Dot:
    """The dimension numbers of a dot_general; sides are 0 (left) and 1 (right)."""

    batch: tuple[tuple[int, ...], tuple[int, ...]]
    contracting: tuple[tuple[int, ...], tuple[int, ...]]
    ranks: tuple[int, int]

    @classmethod
    def read(cls, op: ir.Operation) -> _Dot:
        numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        return cls(
            (
                tuple(numbers.lhs_batching_dimensions),
                tuple(numbers.rhs_batching_dimensions),
            ),
            (
                tuple(numbers.lhs_contracting_dimensions),
                tuple(numbers.rhs_contracting_dimensions),
            ),
            tuple(len(v.type.shape) for v in op.operands),
        )

    def attribute(self) -> ir.Attribute:
        return stablehlo.DotDimensionNumbers.get(*self.batch, *self.contracting)

    def free(self, side: int) -> list[int]:
        used = {*self.batch[side], *self.contracting[side]}
        return [d for d in range(self.ranks[side]) if d not in used]

    def absorb(
        self, perms: Sequence[tuple[int, ...] | None]
    ) -> tuple[_Dot, tuple[int, ...]]:
        """Takes operand i without its transpose by perms[i].

        Returns:
          The new numbers, and the permutation that makes the old result of the new.
        """
        batch, contracting = list(self.batch), list(self.contracting)
        result = list(range(len(self.batch[0])))
        for side, perm in enumerate(perms):
            moved = self.free(side)
            if perm is not None:
                batch[side] = permuted(perm, batch[side])
                contracting[side] = permuted(perm, contracting[side])
                moved = list(permuted(perm, moved))
            start, order = len(result), sorted(moved)
            result += [start + order.index(d) for d in moved]
        new = _Dot(tuple(batch), tuple(contracting), self.ranks)
        return new, tuple(result)


def _leaf_permutation(
    value: ir.Value, block: Any, fuel: list[int]
) -> tuple[int, ...] | None:
    """Returns the permutation of the first transpose above `value`, else None.

    Only looks through elementwise operations that nobody else uses, and at no more
    than fuel[0] operations.
    """
    op = producer(value)
    fuel[0] -= 1
    if op is None or not is_plain(op):
        return None
    if op.name == _TRANSPOSE:
        return int_list(op, "permutation")
    if op.name not in ELEMENTWISE or op.block != block or fuel[0] < 0:
        return None
    if single_user(value) is None:
        return None
    for operand in op.operands:
        if len(operand.type.shape) != 0:
            found = _leaf_permutation(operand, block, fuel)
            if found is not None:
                return found
    return None


def fold_into_dot(op: ir.Operation) -> Match | str | None:
    """Lets a dot_general read its operands as they were before a transpose."""
    sides = list(op.operands)
    if sides[0] == sides[1]:
        return None  # one value on both sides: both would have to change alike
    perms = [_leaf_permutation(value, op.block, [_MAX_TREE]) for value in sides]
    if perms == [None, None]:
        return None
    if not is_plain(op):
        return "the dot_general has attributes that would be lost"
    if any(shape_of(value) is None for value in [*sides, op.results[0]]):
        return "dynamic or quantized shape"
    dot = _Dot.read(op)
    below = single_user(op.results[0])
    absorbs = below is not None and below.name == _TRANSPOSE and is_plain(below)
    choices = [perms, [perms[0], None], [None, perms[1]]]
    best = None
    for choice in choices if None not in perms else [perms]:
        found = _dot_choice(op, dot, choice, absorbs)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        return "as many transposes would be left"
    return Match(op, best[1])


def _dot_choice(
    op: ir.Operation, dot: _Dot, perms: Sequence[tuple[int, ...] | None], absorbs: bool
) -> tuple[int, Callable[[Rewriter], ir.Value]] | None:
    """Returns (cost, build) of a dot_general without these transposes, if allowed."""
    new, order = dot.absorb(perms)
    planner = _Planner(op)
    sides = list(op.operands)
    plans = [
        _Plan(0, lambda rewriter, value=value: value)
        if perm is None
        else planner.plan(value, inverse(perm))
        for value, perm in zip(sides, perms, strict=True)
    ]
    cost = sum(plan.cost for plan in plans)
    reordered = not is_identity(order)
    direct = all(
        perm is None or producer(value, _TRANSPOSE) is not None
        for value, perm in zip(sides, perms, strict=True)
    )
    if reordered and not absorbs:
        cost += 1
    if cost > 0 or (cost == 0 and (reordered or not direct)):
        return None
    shape = permuted(op.results[0].type.shape, inverse(order))

    def build(rewriter: Rewriter) -> ir.Value:
        attributes = {name: op.attributes[name] for name in op.attributes.keys()}
        attributes["dot_dimension_numbers"] = new.attribute()
        kind = tensor_type(shape, element_type(op.results[0]))
        operands = [plan.build(rewriter) for plan in plans]
        value = rewriter.create("stablehlo.dot_general", operands, kind, attributes)
        return rewriter.transpose(value, order) if reordered else value

    return cost, build


def reorder_batch(op: ir.Operation) -> Match | str | None:
    """Folds a transpose that only reorders a product's batch dims into the product."""
    dot_op = producer(op.operands[0], "stablehlo.dot_general")
    if dot_op is None or dot_op.block != op.block:
        return None
    if single_user(op.operands[0]) is None:
        return None
    perm = int_list(op, "permutation")
    dot = _Dot.read(dot_op)
    count = len(dot.batch[0])
    if perm[count:] != tuple(range(count, len(perm))):
        return None
    if not (is_plain(op) and is_plain(dot_op)):
        return "the product or its transpose has attributes that would be lost"
    if any(shape_of(v) is None for v in (*dot_op.operands, op.results[0])):
        return "dynamic or quantized shape"
    batch = tuple(permuted(side, perm[:count]) for side in dot.batch)
    new = _Dot(batch, dot.contracting, dot.ranks)

    def build(rewriter: Rewriter) -> ir.Value:
        names = dot_op.attributes.keys()
        attributes = {name: dot_op.attributes[name] for name in names}
        attributes["dot_dimension_numbers"] = new.attribute()
        return rewriter.create(
            "stablehlo.dot_general",
            list(dot_op.operands),
            op.results[0].type,
            attributes,
            dot_op.location,
        )

    return Match(op, build)


PATTERNS = {
    _TRANSPOSE: (hoist_transpose, reorder_batch, sink_transpose),
    "stablehlo.dot_general": (fold_into_dot,),
}


@dataclass(frozen=True)
class FoldTransposes:
    """Composes, folds and moves transposes so that fewer are left."""

    name: ClassVar[str] = "fold-transposes"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = (
        "fold transposes into dot_general and through elementwise operations"
    )

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        changed = False
        # A fold can bring a transpose within reach of one further away.
        for _ in range(4):
            if not rewrite(module.module.operation, PATTERNS):
                break
            changed = True
        return changed
