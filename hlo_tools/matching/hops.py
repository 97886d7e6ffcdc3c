"""Follows values through barriers and through the stacks that loops save.

A scan over layers saves an array for each iteration: the forward loop writes it
into slot i of a stack, the backward loop reads slot j. When every slot is written
exactly once, by the iteration of its number, what the backward loop reads is the
value that iteration j of the forward loop computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax.extend.mlir import ir

from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.reader import (
    defining_op,
    int_array,
    int_of,
    loop_invariant,
    result_number,
    shape_of,
)

BARRIER = "stablehlo.optimization_barrier"
WHILE = "stablehlo.while"
READ = "stablehlo.dynamic_slice"
WRITE = "stablehlo.dynamic_update_slice"


@dataclass(frozen=True)
class Stack:
    """A loop-carried array whose slot i is written by iteration i.

    Attributes:
      loop: the while operation.
      number: of the carried value.
      update: what the body writes, with a leading dimension of size 1.
      write: the dynamic_update_slice.
    """

    loop: ir.Operation
    number: int
    update: object
    write: ir.Operation


def trip_count(loop: ir.Operation) -> tuple[int, int] | None:
    """Returns (number of the counter, count) of a loop that counts 0, 1, ... n - 1.

    None if the loop is of any other kind.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    (result,) = list(condition.operations)[-1].operands
    compare = defining_op(result)
    if compare is None or compare.operation.name != "stablehlo.compare":
        return None
    if "LT" not in str(compare.attributes["comparison_direction"]):
        return None
    counter, limit = compare.operands
    if not isinstance(counter.owner, ir.Block) or counter.owner != condition:
        return None
    number = ir.BlockArgument(counter).arg_number
    count = int_of(_captured(loop, limit))
    start = int_of(loop.operands[number])
    if count is None or start != 0:
        return None
    step = defining_op(list(body.operations)[-1].operands[number])
    if step is None or step.operation.name != "stablehlo.add":
        return None
    one, other = step.operands
    if one != body.arguments[number]:
        one, other = other, one
    if one != body.arguments[number] or int_of(other) != 1:
        return None
    return number, count


def _captured(loop: ir.Operation, value):
    """Returns what a block argument of the condition is before the loop."""
    if not isinstance(value.owner, ir.Block):
        return value
    number = ir.BlockArgument(value).arg_number
    body = loop.regions[1].blocks[0]
    return loop_invariant(body.arguments[number])


def same_counter(value, counter) -> bool:
    """Returns whether `value` is the loop counter, as jax.numpy indexes with it.

    A negative index would count from the end; the counter never is negative.
    """
    op = defining_op(value)
    if value == counter:
        return True
    if op is not None and op.operation.name == "stablehlo.select":
        predicate, _, otherwise = op.operands
        compare = defining_op(predicate)
        if compare is None or compare.operation.name != "stablehlo.compare":
            return False
        negative = "LT" in str(compare.attributes["comparison_direction"])
        left, right = compare.operands
        return (
            negative and otherwise == counter and left == counter and int_of(right) == 0
        )
    return False


class Hops:
    """Remembers which loops save what, and at which slot they have been read."""

    def __init__(self):
        # loops are known by their first result: the hash of an operation changes
        # with its operands
        self._stacks: dict[tuple[object, int], Stack | None] = {}
        self._trips: dict[object, tuple[int, int] | None] = {}
        self.slots: dict[object, object] = {}

    def stack(self, loop: ir.Operation, number: int) -> Stack | None:
        """Returns the stack that a loop carries as its value `number`."""
        key = (loop.results[0], number)
        if key not in self._stacks:
            self._stacks[key] = self._find_stack(loop, number)
        return self._stacks[key]

    def trip(self, loop: ir.Operation) -> tuple[int, int] | None:
        """Returns (number of the counter, count) of a loop that counts from 0."""
        key = loop.results[0]
        if key not in self._trips:
            self._trips[key] = trip_count(loop)
        return self._trips[key]

    def forget(self, loop: ir.Operation) -> None:
        """Forgets a loop that is about to be replaced."""
        self._stacks = {
            k: s for k, s in self._stacks.items() if k[0] != loop.results[0]
        }
        self._trips.pop(loop.results[0], None)

    def _find_stack(self, loop: ir.Operation, number: int) -> Stack | None:
        trip = self.trip(loop)
        body = loop.regions[1].blocks[0]
        carried = body.arguments[number]
        write = defining_op(list(body.operations)[-1].operands[number])
        if trip is None or write is None or write.operation.name != WRITE:
            return None
        stack, update, first, *rest = write.operands
        counter = body.arguments[trip[0]]
        shape, part = shape_of(stack), shape_of(update)
        if stack != carried or len(list(carried.uses)) != 1:
            return None
        if shape[0] != trip[1] or part != (1, *shape[1:]):
            return None
        if not same_counter(first, counter):
            return None
        if any(int_of(index) != 0 for index in rest):
            return None
        return Stack(loop, number, update, write.operation)

    def origin(self, value):
        """Returns the value that `value` is equal to, as far back as can be told.

        Raises:
          NoMatchError: one loop's stacks are read at two different slots.
        """
        while True:
            value = loop_invariant(value)
            op = defining_op(value)
            if op is None:
                return value
            if op.operation.name == BARRIER:
                value = op.operands[result_number(value)]
                continue
            if op.operation.name != READ:
                return value
            found = self.read_stack(op)
            if found is None:
                return value
            self.note(*found)
            value = found[0].update

    def note(self, stack: Stack, slot) -> None:
        """Remembers the slot that a loop's stacks are read at.

        Raises:
          NoMatchError: they were read at another one.
        """
        self.note_slots({stack.loop.results[0]: slot})

    def note_slots(self, slots: dict[object, object]) -> None:
        """Remembers slots that others have found (see `note`)."""
        for loop, slot in slots.items():
            if self.slots.setdefault(loop, slot) != slot:
                raise NoMatchError("a loop's saved values are read at different slots")

    def read_stack(self, op) -> tuple[Stack, object] | None:
        """Returns (stack, slot) if a dynamic_slice reads one slot of a stack."""
        base = self.unit_free(op.operands[0])
        source = defining_op(base)
        if source is None or source.operation.name != WHILE:
            return None
        stack = self.stack(source.operation, result_number(base))
        sizes = int_array(op.attributes["slice_sizes"])
        if stack is None or sizes != shape_of(stack.update):
            return None
        if shape_of(base) != shape_of(op.operands[0]):
            return None
        if any(int_of(index) != 0 for index in op.operands[2:]):
            return None
        return stack, loop_invariant(op.operands[1])

    def saves(self, stack: Stack, value) -> list | None:
        """Returns how a stack saves a value, or None if it does not.

        Returns:
          The rearrangements between the value and what is written, last first.
        """
        saved, path = loop_invariant(stack.update), []
        while saved != value:
            op = defining_op(saved)
            if op is None or not keeps_order(op):
                return None
            path.append(op)
            saved = loop_invariant(op.operands[0])
        return path

    def unit_free(self, value):
        """Returns what a value is but for dimensions of size 1.

        A stack of stacks is read so: the slot of the outer one, reshaped, is what an
        inner loop left behind.
        """
        value = loop_invariant(value)
        while (op := defining_op(value)) is not None:
            name = op.operation.name
            if name == WHILE:
                return value
            if name != _TRANSPOSE and keeps_order(op):
                value = loop_invariant(op.operands[0])
                continue
            deeper = self.origin(value)
            if deeper == value:
                return value
            value = deeper
        return value


_TRANSPOSE = "stablehlo.transpose"


def keeps_order(op) -> bool:
    """Returns whether an operation only rearranges: every element is there once."""
    name = op.operation.name
    if name in ("stablehlo.reshape", _TRANSPOSE):
        return True
    if name != "stablehlo.broadcast_in_dim":
        return False
    dims = int_array(op.attributes["broadcast_dimensions"])
    sizes = math.prod(shape_of(op.operands[0])), math.prod(shape_of(op.results[0]))
    return sizes[0] == sizes[1] and list(dims) == sorted(dims)
