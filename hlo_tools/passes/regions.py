"""Moves operations out of regions, and makes operations with fewer results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir

from hlo_tools.rewriting import is_plain


def operations(block: ir.Block) -> list[ir.Operation]:
    """Returns the operations of a block, the terminator included."""
    return [op.operation for op in block.operations]


def terminator(block: ir.Block) -> ir.Operation:
    """Returns the last operation of a block."""
    return operations(block)[-1]


def is_within(value: ir.Value, op: ir.Operation) -> bool:
    """Returns whether a value is made in a region of `op`."""
    owner = value.owner
    block = owner if isinstance(owner, ir.Block) else owner.operation.block
    while block is not None:
        parent = block.owner
        if parent is None:
            return False
        if parent.operation == op:
            return True
        if parent.operation.name in ("func.func", "builtin.module"):
            return False
        block = parent.operation.block
    return False


def inline_region(op: ir.Operation, number: int, arguments: Sequence[Any]) -> None:
    """Puts what a region does in the place of its operation.

    Args:
      op: erased.
      number: of the region, which has one block.
      arguments: what the block's arguments are.
    """
    block = op.regions[number].blocks[0]
    for old, new in zip(list(block.arguments), arguments, strict=True):
        old.replace_all_uses_with(new)
    *body, last = operations(block)
    for one in body:
        one.move_before(op)
    for old, new in zip(op.results, list(last.operands), strict=True):
        old.replace_all_uses_with(new)
    op.erase()


def with_results(
    op: ir.Operation, keep: Sequence[int], operands: Sequence[Any]
) -> ir.Operation:
    """Returns an operation with some of the results, in the place of `op`.

    Args:
      op: erased; its regions move to the new one, whose terminators are left alone.
      keep: numbers of the results, the others of which have no use.
      operands: of the new operation.
    """
    attributes = {name: op.attributes[name] for name in op.attributes.keys()}
    new = ir.Operation.create(
        op.name,
        results=[op.results[number].type for number in keep],
        operands=list(operands),
        attributes=attributes,
        regions=len(op.regions),
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    for number, region in enumerate(op.regions):
        region.blocks[0].append_to(new.regions[number])
    for place, number in enumerate(keep):
        op.results[number].replace_all_uses_with(new.results[place])
    op.erase()
    return new


def return_only(block: ir.Block, keep: Sequence[int]) -> None:
    """Makes a block return some of what it returns."""
    last = terminator(block)
    values = [last.operands[number] for number in keep]
    ir.Operation.create(
        last.name, operands=values, loc=last.location, ip=ir.InsertionPoint(last)
    )
    last.erase()


def is_unused(value: ir.Value) -> bool:
    return next(iter(value.uses), None) is None


def may_change(op: ir.Operation, known: Sequence[str]) -> bool:
    """Returns whether `op` has no attributes but the known ones."""
    return is_plain(op) or set(op.attributes.keys()) <= set(known)
