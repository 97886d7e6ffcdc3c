"""Hands values of a forward pass to its backward pass, through loops where need be.

A backward loop over layers can use what the forward loop computed only if that was
saved for each iteration.  What is saved already is used; what comes from outside of
the loops needs no saving; anything else gets a stack of its own.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools import loops
from hlo_tools.matching.hops import WHILE, Hops
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.outline import undone
from hlo_tools.matching.reader import (
    defining_op,
    dtype_of,
    loop_invariant,
    shape_of,
)


def _is_inside(block: ir.Block, outer: ir.Block) -> bool:
    """Returns whether `block` is `outer` or lies in one of its operations."""
    while block != outer:
        parent = block.owner
        if parent is None or parent.operation.name in ("func.func", "builtin.module"):
            return False
        block = parent.operation.block
    return True


def _block_of(value) -> ir.Block:
    owner = value.owner
    return owner if isinstance(owner, ir.Block) else owner.operation.block


class SavedValues:
    """The way from one forward pass to its backward pass.

    Args:
      forward, backward: operations of the two.
      hops: at which slots the backward pass reads the stacks of which loops.

    Raises:
      NoMatchError: there is no such way.
    """

    def __init__(self, forward: ir.Operation, backward: ir.Operation, hops: Hops):
        self.backward, self.hops = backward, hops
        self.loops: list[tuple[ir.Operation, Any]] = []  # (forward loop, slot)
        block = forward.block
        while not _is_inside(backward.block, block):
            loop = block.owner.operation
            if loop.name != WHILE or loop.results[0] not in hops.slots:
                raise NoMatchError("the backward pass stands where nothing is saved")
            slot = hops.slots[loop.results[0]]
            if not _is_inside(backward.block, _block_of(slot)):
                raise NoMatchError("what it reads was saved by another loop")
            self.loops.insert(0, (loop, slot))
            block = loop.block
        while (parent := block.owner) is not None and parent.operation.name == WHILE:
            if parent.operation.results[0] in hops.slots:
                raise NoMatchError("it reads what another iteration computed")
            block = parent.operation.block
        self._found: dict[Any, Any] = {}
        # a loop that gets another stack is replaced: what its body carries has to be
        # looked up again
        self._carried = {
            value: (level, number)
            for level, (loop, _) in enumerate(self.loops)
            for number, value in enumerate(loop.regions[1].blocks[0].arguments)
        }

    def _current(self, value):
        """Returns a carried value by its handle in the loop as it is now."""
        if value not in self._carried:
            return value
        level, number = self._carried[value]
        return self.loops[level][0].regions[1].blocks[0].arguments[number]

    def get(self, value):
        """Returns what a value of the forward pass is in the backward pass."""
        return self._get(value, len(self.loops))

    def _get(self, value, level: int):
        if level == 0:
            return value
        value = loop_invariant(self._current(value))
        loop, slot = self.loops[level - 1]
        if not _is_inside(_block_of(value), loop.regions[1].blocks[0]):
            return self._get(value, level - 1)
        key = (value, level)
        if key not in self._found:
            number, path = self._stack_of(loop, value)
            if number is None:
                loop, number = self._save(level, value)
            stack = self._get(loop.results[number], level - 1)
            self._found[key] = self._read(stack, slot, value, path)
        return self._found[key]

    def _stack_of(self, loop: ir.Operation, value) -> tuple[int | None, list]:
        """Returns which carried value saves `value`, if any, and how."""
        for number in range(len(loop.results)):
            stack = self.hops.stack(loop, number)
            path = None if stack is None else self.hops.saves(stack, value)
            if path is not None:
                return number, path
        return None, []

    def _save(self, level: int, value) -> tuple[ir.Operation, int]:
        """Gives the forward loop another stack; returns it and the number."""
        loop, slot = self.loops[level - 1]
        trip = self.hops.trip(loop)
        assert trip is not None
        counter, count = trip
        shape = [count, *shape_of(value)]
        element = ir.RankedTensorType(value.type).element_type
        kind = ir.RankedTensorType.get(shape, element)
        with ir.InsertionPoint(loop), loop.location:
            zero = _zeros(kind, dtype_of(value))
        self.hops.forget(loop)
        # the old results must not stay as keys: others may get their addresses
        old = {result: place for place, result in enumerate(loop.results)}
        new = loops.rebuild(loop, range(len(old)), [zero])
        self._found = {
            (new.results[old[key]] if key in old else key, at): found
            for (key, at), found in self._found.items()
        }
        self.loops[level - 1] = (new, slot)
        number = len(new.results) - 1
        body = new.regions[1].blocks[0]
        last = list(body.operations)[-1].operation
        with ir.InsertionPoint(last), last.location:
            part = ir.RankedTensorType.get([1, *shape[1:]], element)
            update = stablehlo.ReshapeOp(part, value).result
            index = _starts(body.arguments[counter], len(shape))
            stack = stablehlo.DynamicUpdateSliceOp(
                body.arguments[number], update, index
            ).result
        loops.set_handed_on(new, number, stack)
        return new, number

    def _read(self, stack, slot, value, path):
        """Reads one slot of a stack at the place of the backward pass."""
        shape, place = shape_of(stack)[1:], self.backward
        while _block_of(slot) != place.block and not isinstance(slot.owner, ir.Block):
            if not _is_inside(place.block, _block_of(slot)):
                break
            if _is_constant(slot):
                break
            place = place.block.owner.operation
        with ir.InsertionPoint(place), place.location:
            part = stablehlo.DynamicSliceOp(
                stack, _starts(slot, len(shape) + 1), [1, *shape]
            ).result
            for op in path:
                part = undone(op, part)
            if shape_of(part) != shape_of(value):
                part = stablehlo.ReshapeOp(value.type, part).result
            return part


def _is_constant(value) -> bool:
    op = defining_op(value)
    return op is not None and op.operation.name == "stablehlo.constant"


def _starts(first, rank: int) -> list[Any]:
    zero = _zeros(first.type, dtype_of(first))
    return [first, *[zero] * (rank - 1)]


def _zeros(kind, dtype: str):
    element = ir.RankedTensorType(kind).element_type
    if dtype.startswith(("f", "bf")):
        splat = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(element, 0.0))
    elif dtype == "i1":
        splat = ir.DenseElementsAttr.get_splat(kind, ir.BoolAttr.get(False))
    else:
        splat = ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(element, 0))
    return stablehlo.ConstantOp(splat).result
