"""Folds transposes into dot products, into each other, and through elementwise ops.

Every rewrite keeps each element's value and computes it with the same operations;
only the order in which elements are laid out changes. A rewrite is made when fewer
transposes are left, counted by planning it first.

XLA may fuse the result differently, and LLVM contracts a product and a sum of one
fusion on a CPU to one instruction that rounds once. So a compiled program can differ
in the last bit where the same arithmetic is fused otherwise; without such
instructions (`--xla_cpu_max_isa=AVX`) it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools.passes.transpose_plans import (
    MAX_TREE,
    THROUGH,
    TRANSPOSE,
    Plan,
    Planner,
)
from hlo_tools.rewriting import (
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
    tensor_type,
)


def hoist_transpose(op: ir.Operation) -> Match | str | None:
    """Makes what is above a transpose in permuted order, if that saves one."""
    if shape_of(op.results[0]) is None:
        return "dynamic or quantized shape"
    if not is_plain(op):
        return "the transpose has attributes that would be lost"
    perm = int_list(op, "permutation")
    source = op.operands[0]
    above = producer(source)
    plan = Planner(op).plan(source, perm)
    saved = 1 - plan.cost
    direct = above is not None and above.name == TRANSPOSE and is_plain(above)
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
    if below is None or below.name not in THROUGH or below.block != op.block:
        return None
    if len(below.operands) < 2 or shape_of(below.results[0]) is None:
        return None
    if not (is_plain(op) and is_plain(below)):
        return "the transpose or its user has attributes that would be lost"
    perm = int_list(op, "permutation")
    back = inverse(perm)
    plan = Planner(below).through(below, back)
    if plan.cost + 1 >= 0:
        return None
    return Match(below, lambda rw: rw.transpose(plan.build(rw), perm))


# ----------------------------------------------------------------- dot_general


@dataclass(frozen=True)
class _Dot:
    """The dimension numbers of a dot_general; sides are 0 (left) and 1 (right)."""

    batch: tuple[tuple[int, ...], ...]
    contracting: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]

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
        return stablehlo.DotDimensionNumbers.get(
            self.batch[0], self.batch[1], self.contracting[0], self.contracting[1]
        )

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
    if op.name == TRANSPOSE:
        return int_list(op, "permutation")
    if op.name not in THROUGH or op.block != block or fuel[0] < 0:
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
    perms = [_leaf_permutation(value, op.block, [MAX_TREE]) for value in sides]
    if perms == [None, None]:
        return None
    if not is_plain(op):
        return "the dot_general has attributes that would be lost"
    if any(shape_of(value) is None for value in [*sides, op.results[0]]):
        return "dynamic or quantized shape"
    dot = _Dot.read(op)
    below = single_user(op.results[0])
    absorbs = below is not None and below.name == TRANSPOSE and is_plain(below)
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
    planner = Planner(op)
    sides = list(op.operands)
    plans = [
        Plan(0, lambda rewriter, value=value: value)
        if perm is None
        else planner.plan(value, inverse(perm))
        for value, perm in zip(sides, perms, strict=True)
    ]
    cost = sum(plan.cost for plan in plans)
    reordered = not is_identity(order)
    direct = all(
        perm is None or producer(value, TRANSPOSE) is not None
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
    TRANSPOSE: (hoist_transpose, reorder_batch, sink_transpose),
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
        """Rewrites `module` in place; returns whether anything changed.

        A partitioned program is left as it is: where its dimensions stand decides
        which arrays XLA moves between devices.
        """
        changed = False
        if module.partitions > 1:
            return False
        # A fold can bring a transpose within reach of one further away.
        for _ in range(4):
            if not rewrite(module.module.operation, PATTERNS):
                break
            changed = True
        return changed
