"""Plans permuted copies of values, counting the transposes that would be left.

A plan is made by going up from a value through operations that can as well run on
permuted operands, until all paths end at something that absorbs the permutation (a
transpose, a broadcast, an iota, a splat constant) or needs a new transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jax.extend.mlir import ir

from hlo_tools.rewriting import (
    ELEMENTWISE,
    Rewriter,
    element_type,
    int_list,
    inverse,
    is_identity,
    is_plain,
    permuted,
    producer,
    shape_of,
    single_user,
    splat_attribute,
)

TRANSPOSE = "stablehlo.transpose"
# A permuted result of these needs no more than permuted operands.
THROUGH = ELEMENTWISE | {"stablehlo.concatenate", "stablehlo.slice"}
# Bounds the search above one transpose; real chains are a handful of operations.
MAX_TREE = 64
# The cost of what can not be done.
_NEVER = 1_000_000


@dataclass(frozen=True)
class Plan:
    """How to make a permuted copy of a value.

    Attributes:
      cost: how many transposes there are more (or, negative, fewer) afterwards.
      build: makes the value.
    """

    cost: int
    build: Callable[[Rewriter], ir.Value]


class Planner:
    """Plans permuted copies of the values above one operation.

    Args:
      root: the operation in front of which they would be made.
    """

    def __init__(self, root: ir.Operation):
        self.block = root.block
        self.fuel = MAX_TREE

    def plan(self, value: ir.Value, perm: tuple[int, ...]) -> Plan:
        """Returns the cheapest way to make transpose(value, perm)."""
        if is_identity(perm):
            return Plan(0, lambda rewriter: value)
        if shape_of(value) is None:
            return Plan(_NEVER, lambda rewriter: value)
        self.fuel -= 1
        op = producer(value)
        if op is not None and self.fuel > 0 and is_plain(op):
            if op.name == TRANSPOSE:
                return self._compose(op, perm)
            if op.name == "stablehlo.broadcast_in_dim":
                return self._broadcast(op, perm)
            if op.name in ("stablehlo.constant", "stablehlo.iota"):
                if (found := _permuted_source(op, perm)) is not None:
                    return found
            if op.name in THROUGH and op.block == self.block:
                if single_user(value) is not None:
                    return self.through(op, perm)
        return Plan(1, lambda rewriter: rewriter.transpose(value, perm))

    def _compose(self, op: ir.Operation, perm: tuple[int, ...]) -> Plan:
        source = op.operands[0]
        both = permuted(int_list(op, "permutation"), perm)
        dies = -1 if single_user(op.results[0]) is not None else 0
        if is_identity(both):
            return Plan(dies, lambda rewriter: source)
        return Plan(1 + dies, lambda rewriter: rewriter.transpose(source, both))

    def _broadcast(self, op: ir.Operation, perm: tuple[int, ...]) -> Plan:
        source = op.operands[0]
        where = inverse(perm)
        dims = [where[d] for d in int_list(op, "broadcast_dimensions")]
        # XLA wants broadcast dimensions in order: sort them in the (smaller) source.
        order = tuple(sorted(range(len(dims)), key=dims.__getitem__))
        inner = self.plan(source, order)
        shape = permuted(op.results[0].type.shape, perm)

        def build(rewriter: Rewriter) -> ir.Value:
            return rewriter.broadcast(inner.build(rewriter), shape, sorted(dims))

        return Plan(inner.cost, build)

    def through(self, op: ir.Operation, perm: tuple[int, ...]) -> Plan:
        """Plans a permuted copy of an operation of `THROUGH`, from its operands."""
        operands = list(op.operands)
        shape = permuted(op.results[0].type.shape, perm)
        plans = {value: self._operand(value, perm) for value in dict.fromkeys(operands)}

        def build(rewriter: Rewriter) -> ir.Value:
            made = {value: plan.build(rewriter) for value, plan in plans.items()}
            attributes = _permuted_attributes(op, perm)
            return rewriter.with_operands(
                op, [made[v] for v in operands], shape, attributes
            )

        return Plan(sum(plan.cost for plan in plans.values()), build)

    def _operand(self, value: ir.Value, perm: tuple[int, ...]) -> Plan:
        """Plans an operand; the scalars of a select or clamp stay scalars."""
        if len(value.type.shape) == 0:
            return Plan(0, lambda rewriter: value)
        return self.plan(value, perm)


def _permuted_attributes(
    op: ir.Operation, perm: tuple[int, ...]
) -> dict[str, ir.Attribute]:
    """Returns those attributes of `op` that name dims, as they are after `perm`."""
    if op.name == "stablehlo.concatenate":
        dim = op.attributes["dimension"]
        return {"dimension": ir.IntegerAttr.get(dim.type, perm.index(dim.value))}
    if op.name == "stablehlo.slice":
        names = ("start_indices", "limit_indices", "strides")
        rows = {name: permuted(int_list(op, name), perm) for name in names}
        return {name: ir.DenseI64ArrayAttr.get(row) for name, row in rows.items()}
    return {}


def _permuted_source(op: ir.Operation, perm: tuple[int, ...]) -> Plan | None:
    """Plans a permuted iota or splat constant: no transpose at all."""
    result = op.results[0]
    shape, element = permuted(result.type.shape, perm), element_type(result)
    if op.name == "stablehlo.iota":
        dim = perm.index(op.attributes["iota_dimension"].value)
        return Plan(0, lambda rewriter: rewriter.iota(shape, element, dim))
    number = splat_attribute(result)
    if number is None:
        return None
    return Plan(0, lambda rewriter: rewriter.splat(number, shape, element))
