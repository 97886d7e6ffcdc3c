"""Adds and removes values that a while loop carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo

WHILE = "stablehlo.while"
_SHARDING = "sdy.sharding"


def rebuild(
    loop: ir.Operation,
    keep: Sequence[int],
    added: Sequence[Any] = (),
) -> ir.Operation:
    """Returns a loop that carries other values, in the place of `loop`.

    Args:
      loop: erased; its regions move to the new loop.  Values that are not kept must
        have no use but in the body itself, where they are erased.
      keep: which of the carried values stay, in order.
      added: initial values of further ones, which come last.  The body hands them on
        unchanged until it is told otherwise.
    """
    operands = [loop.operands[number] for number in keep] + list(added)
    with ir.InsertionPoint(loop), loop.location:
        new = stablehlo.WhileOp([v.type for v in operands], operands).operation
    for name in loop.attributes:
        new.attributes[name] = loop.attributes[name]
    _fit_sharding(new, keep, operands)
    gone = sorted(set(range(len(loop.operands))) - set(keep), reverse=True)
    for number, region in enumerate(loop.regions):
        block = region.blocks[0]
        block.append_to(new.regions[number])
        if number == 1 and gone:
            _return_others(block, keep)
            erase_unused(block)
        for place in gone:
            block.erase_argument(place)
        arguments = [block.add_argument(v.type, loop.location) for v in added]
        if number == 1 and arguments:
            _return_also(block, arguments)
    for place, number in enumerate(keep):
        loop.results[number].replace_all_uses_with(new.results[place])
    loop.erase()
    return new


def set_handed_on(loop: ir.Operation, number: int, value) -> None:
    """Sets what the body hands on as carried value `number`."""
    last = list(loop.regions[1].blocks[0].operations)[-1].operation
    last.operands[number] = value


def _return_others(block: ir.Block, keep: Sequence[int]) -> None:
    last = list(block.operations)[-1].operation
    values = [last.operands[number] for number in keep]
    with ir.InsertionPoint(last), last.location:
        stablehlo.ReturnOp(values)
    last.erase()


def _return_also(block: ir.Block, values: Sequence[Any]) -> None:
    last = list(block.operations)[-1].operation
    with ir.InsertionPoint(last), last.location:
        stablehlo.ReturnOp([*last.operands, *values])
    last.erase()


def _fit_sharding(loop: ir.Operation, keep: Sequence[int], operands) -> None:
    """Makes the list of shardings as long as the list of results."""
    if _SHARDING not in loop.attributes:
        return
    old = list(sdy.TensorShardingPerValueAttr(loop.attributes[_SHARDING]).shardings)
    shardings = [old[number] for number in keep]
    mesh = sdy.TensorShardingAttr(old[0]).mesh_or_ref
    for value in operands[len(keep) :]:
        rank = len(ir.RankedTensorType(value.type).shape)
        dims = [sdy.DimensionShardingAttr.get([], is_closed=False)] * rank
        shardings.append(sdy.TensorShardingAttr.get(mesh, dims))
    loop.attributes[_SHARDING] = sdy.TensorShardingPerValueAttr.get(shardings)


# With these, an operation may have effects or mean more than its results.
_EFFECTS = ("custom_call", "outfeed", "infeed", "send", "recv", "rng", "all_", "return")


def is_pure(op: ir.Operation) -> bool:
    """Returns whether an operation, all its regions included, has no effects.

    Calls, collectives and custom calls count as having some.
    """
    if op.name in ("func.call", "sdy.manual_computation"):
        return False
    if any(part in op.name for part in _EFFECTS):
        return False
    return all(
        inner.operation.name == "stablehlo.return" or is_pure(inner.operation)
        for region in op.regions
        for block in region.blocks
        for inner in block.operations
    )


def erase_unused(block: ir.Block) -> None:
    """Erases operations of a block whose results nothing uses."""
    for op in reversed(list(block.operations)):
        operation = op.operation
        if not len(operation.results) or not is_pure(operation):
            continue
        if not any(list(result.uses) for result in operation.results):
            operation.erase()


def unused_values(loop: ir.Operation) -> set[int]:
    """Returns which carried values are only there for themselves.

    Nothing after the loop uses them, the condition does not, and no operation of the
    body that has an effect or leads to another carried value does.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    needed = {
        number
        for number, result in enumerate(loop.results)
        if list(result.uses) or list(condition.arguments[number].uses)
    }
    operations = [op.operation for op in body.operations]
    returned = list(operations[-1].operands)
    arguments = {value: number for number, value in enumerate(body.arguments)}
    alive: set = set()
    pending = [value for op in operations[:-1] if _keeps(op) for value in reads(op)]
    done: set[int] = set()
    while True:
        pending.extend(returned[number] for number in needed - done)
        done |= needed
        while pending:
            value = pending.pop()
            if value in alive:
                continue
            alive.add(value)
            if value in arguments:
                needed.add(arguments[value])
            elif not isinstance(value.owner, ir.Block):
                pending.extend(reads(value.owner.operation))
        if needed == done:
            return set(range(len(loop.results))) - needed


def _keeps(op: ir.Operation) -> bool:
    """Returns whether an operation stays even if nothing uses its results."""
    return not is_pure(op) or not len(op.results)


def reads(op: ir.Operation) -> list[Any]:
    """Returns the values that an operation reads, those of its regions included."""
    values = list(op.operands)
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                values.extend(reads(inner.operation))
    return values
