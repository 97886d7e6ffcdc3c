"""Collects what is computed from the scores of a site, forward and backward."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from jax.extend.mlir import ir

from hlo_tools.matching.hops import BARRIER, READ, WHILE, WRITE, Hops, Stack
from hlo_tools.matching.index_space import IncompatibleReshapeError, Index
from hlo_tools.matching.reader import (
    ELEMENTWISE,
    SHAPE_OPS,
    int_array,
    result_index,
    shape_of,
)

# A site and its backward pass are some 60 operations; modified scores and other
# spellings of the softmax take more.
_MOST_VALUES = 2000


@dataclass
class Dependents:
    """Values computed from a score product without another product in between.

    Attributes:
      index: value -> the index of its dimensions, or None where it is not known.
      products: (dot_general, operand number, index of that operand).
      exits: (value, index or None) that other operations use, not listed above.
    """

    index: dict[object, Index | None] = field(default_factory=dict)
    products: list[tuple[object, int, Index]] = field(default_factory=list)
    exits: list[tuple[object, Index | None]] = field(default_factory=list)


def stack_readers(hops: Hops, stack: Stack) -> Iterator[object]:
    """Yields every dynamic_slice that reads a slot of a stack."""
    seen, pending = set(), [stack.loop.results[stack.number]]
    while pending:
        value = pending.pop()
        if value in seen or len(seen) > _MOST_VALUES:
            continue
        seen.add(value)
        for use in value.uses:
            op, number = use.owner.operation, use.operand_number
            if op.name == READ and number == 0:
                found = hops.read_stack(op)
                if found is not None and found[0] == stack:
                    yield op
                else:
                    pending.append(op.results[0])  # a slot of a stack of stacks
            elif op.name == WHILE:
                pending.append(op.regions[1].blocks[0].arguments[number])
            elif op.name == BARRIER:
                pending.append(op.results[number])
            elif op.name in SHAPE_OPS:
                pending.append(op.results[0])
            elif op.name == WRITE and number == 1:
                outer = written_stack(hops, op)
                if outer is not None:
                    pending.append(outer.loop.results[outer.number])


def written_stack(hops: Hops, write: ir.Operation) -> Stack | None:
    """Returns the stack that a dynamic_update_slice fills."""
    parent = write.parent
    if parent is None or parent.operation.name != WHILE:
        return None
    for use in write.results[0].uses:
        if use.owner.operation.name == "stablehlo.return":
            stack = hops.stack(parent.operation, use.operand_number)
            if stack is not None and stack.write == write:
                return stack
    return None


def collect(hops: Hops, starts: list, stop: set) -> Dependents:
    """Collects everything computed from some values.

    Args:
      hops: follows loops.
      starts: (value, index) of each.
      stop: values to go no further from.

    Raises:
      SplitAtomError: a reshape cuts through an atom of a known index.
    """
    found = Dependents()
    pending: deque = deque(starts)
    while pending and len(found.index) < _MOST_VALUES:
        value, index = pending.popleft()
        if found.index.get(value) is not None or (
            index is None and value in found.index
        ):
            continue
        found.index[value] = index
        if value in stop:
            continue
        for use in value.uses:
            for result, inner in _step(hops, use, value, index, found):
                # what has a known index goes first
                if inner is None:
                    pending.append((result, inner))
                else:
                    pending.appendleft((result, inner))
    return found


def _step(hops: Hops, use, value, index, found: Dependents):
    op, number = use.owner.operation, use.operand_number
    name = op.name
    if name in ELEMENTWISE:
        same = shape_of(op.results[0]) == shape_of(value)
        return [(op.results[0], index if same else None)]
    if name in SHAPE_OPS or name == "stablehlo.reduce":
        return [(op.results[0], None if index is None else _moved(op, index))]
    if name == BARRIER:
        return [(op.results[number], index)]
    if name == WRITE and number == 1:
        stack = written_stack(hops, op)
        if stack is not None:
            return [(d.results[0], index) for d in stack_readers(hops, stack)]
    if name == "stablehlo.dot_general" and index is not None:
        found.products.append((op, number, index))
    else:
        found.exits.append((value, index))
    return []


def carried_on(hops: Hops, use, value, index: Index) -> list:
    """Returns (value, index) of what a use merely rearranges, converts or saves."""
    name = use.owner.operation.name
    if (name in ELEMENTWISE and name not in _SCALING) or name == "stablehlo.reduce":
        return []
    if name == "stablehlo.dot_general":
        return []
    return _step(hops, use, value, index, Dependents())


_SCALING = {"stablehlo.convert", "stablehlo.multiply", "stablehlo.divide"}


def _moved(op, index: Index) -> Index | None:
    """Returns the index of the result of a shape operation or reduction."""
    if op.name == "stablehlo.broadcast_in_dim":
        dims = int_array(op.attributes["broadcast_dimensions"])
        operand, shape = shape_of(op.operands[0]), shape_of(op.results[0])
        if math.prod(operand) != math.prod(shape):
            return None
        moved: list = [()] * len(shape)
        for number, dim in enumerate(dims):
            moved[dim] = index[number]
        return tuple(moved)
    if op.name == "stablehlo.reduce":
        dims = int_array(op.attributes["dimensions"])
        return tuple(dim for n, dim in enumerate(index) if n not in dims)
    try:
        return result_index(op, index)
    except IncompatibleReshapeError:
        return None


def terminals(hops: Hops, values) -> list[ir.Operation]:
    """Returns the operations at which everything computed from `values` ends.

    Elementwise and shape operations, sums, barriers and saved stacks are followed;
    what a loop carries for nothing ends nowhere.
    """
    ends: list[ir.Operation] = []
    seen, pending = set(), list(values)
    nothing = Dependents()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        for use in value.uses:
            op, number = use.owner.operation, use.operand_number
            if op.name in (WHILE, READ, WRITE, "stablehlo.return"):
                following = _followed(hops, op, number)
            else:
                following = [v for v, _ in _step(hops, use, value, None, nothing)]
            if following is None or len(seen) > _MOST_VALUES:
                ends.append(op)
            elif following or not _is_followed(op):
                pending.extend(following)
                if not following:
                    ends.append(op)
    return ends


def _is_followed(op: ir.Operation) -> bool:
    return op.name in ELEMENTWISE | SHAPE_OPS | {"stablehlo.reduce", BARRIER} | {
        WHILE, READ, WRITE, "stablehlo.return",
    }  # fmt: skip


def _followed(hops: Hops, op: ir.Operation, number: int) -> list | None:
    """Returns where a loop-carried value goes on, or None if it is used otherwise."""
    if op.name == WHILE:
        condition, body = (region.blocks[0] for region in op.regions)
        if list(condition.arguments[number].uses):
            return None
        return [body.arguments[number], op.results[number]]
    if op.name == "stablehlo.return":
        parent = op.parent.operation
        if parent.name != WHILE or op.block == parent.regions[0].blocks[0]:
            return None
        return [parent.regions[1].blocks[0].arguments[number], parent.results[number]]
    if (op.name == WRITE and number > 1) or (op.name == READ and number > 0):
        return None
    return [op.results[0]]
