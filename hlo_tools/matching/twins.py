"""Tells values that a program computes again from the same inputs.

`jax.checkpoint` writes the forward pass once more, behind barriers, and in a loop of
its own. What is computed there by the same operations from the same arrays is the
value that the forward pass had.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

from hlo_tools.matching.hops import (
    READ,
    WHILE,
    Hops,
    keeps_order,
    same_counter,
    trip_count,
)
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.reader import (
    ELEMENTWISE,
    SHAPE_OPS,
    defining_op,
    int_of,
    loop_invariant,
    reducer_of,
    shape_of,
)

_PURE = (
    ELEMENTWISE
    | SHAPE_OPS
    | {
        "stablehlo.concatenate",
        "stablehlo.constant",
        "stablehlo.dot_general",
        "stablehlo.gather",
        "stablehlo.iota",
        "stablehlo.pad",
        "stablehlo.reduce",
        "stablehlo.slice",
        READ,
    }
)
# More operations than from the input of a layer to its scores.
_MOST_PAIRS = 400


class TwinHops(Hops):
    """Follows values to where they were computed first.

    Attributes:
      originals: values whose twins are taken for them.
    """

    def __init__(self):
        super().__init__()
        self.originals: list[Any] = []
        self.twins = Twins()

    def origin(self, value):
        """See `Hops.origin`."""
        value = super().origin(value)
        return self.original(value) or value

    def original(self, value):
        """Returns which of the originals a value is a twin of, or None."""
        if value in self.originals:
            return None
        for original in self.originals:
            if self.twins.are(original, value):
                self.note_slots(self.twins.hops.slots)
                return original
        return None


class Twins:
    """Compares values of one function, with memory.

    Attributes:
      hops: at which slots of which loops the later values were computed; a value of
        a loop's body and its twin belong to one iteration.
    """

    def __init__(self):
        self.hops = Hops()
        self._known: dict[tuple[Any, Any], bool] = {}

    def are(self, first, again) -> bool:
        """Returns whether `again` is computed as `first` is, from the same inputs."""
        if first.type != again.type:
            return False
        slots, known = dict(self.hops.slots), dict(self._known)
        self._pairs = 0
        try:
            found = self._same(first, again)
        except NoMatchError:  # slots that do not go together
            found = False
        found = found and not self._is_inside_of_slots(again)
        if not found:  # what was equal at those slots only is not
            self.hops.slots = slots
            self._known = {k: v for k, v in self._known.items() if k in known or not v}
        return found

    def _is_inside_of_slots(self, value) -> bool:
        """Returns whether a value's own loop is one that it reads a slot of.

        There it would be the twin of another iteration's value.
        """
        owner = value.owner
        block = owner if isinstance(owner, ir.Block) else owner.operation.block
        while (parent := block.owner) is not None:
            operation = parent.operation
            if operation.name != WHILE:
                return False
            if operation.results[0] in self.hops.slots:
                return True
            block = operation.block
        return False

    def _same(self, first, again) -> bool:
        first, again = self._settled(first), self._settled(again)
        if first == again:
            return True
        key = (first, again)
        if key not in self._known:
            self._pairs += 1
            if self._pairs > _MOST_PAIRS:
                return False
            self._known[key] = False
            self._known[key] = self._same_operations(first, again)
        return self._known[key]

    def _settled(self, value):
        """Returns the origin of a value, also that of a slot without its unit axis."""
        value = inner = self.hops.origin(value)
        while (op := defining_op(inner)) is not None and _adds_units(op):
            inner = self.hops.origin(op.operands[0])
            if inner.type == value.type:
                value = inner
        return value

    def _same_operations(self, first, again) -> bool:
        one, two = defining_op(first), defining_op(again)
        if one is None or two is None or first.type != again.type:
            return False
        name = one.operation.name
        if name != two.operation.name or name not in _PURE:
            return False
        if len(one.operands) != len(two.operands) or not _same_attributes(one, two):
            return False
        if name == "stablehlo.reduce":
            reducer = reducer_of(one)
            if reducer is None or reducer != reducer_of(two):
                return False
        pairs = list(zip(one.operands, two.operands, strict=True))
        if name == READ and not self._same(*pairs[1]):
            if not self._same_slot(*pairs[1]):
                return False
            pairs.pop(1)
        # what is next to an input tells two layers apart soonest
        return all(self._same(*pair) for pair in reversed(pairs))

    def _same_slot(self, first, again) -> bool:
        """Takes two loops' counters for one, if a body reads its own iteration."""
        block = defining_op(first)
        first = loop_invariant(first)
        body = first.owner if block is None else block.operation.block
        parent = body.owner
        if parent is None or parent.operation.name != "stablehlo.while":
            return False
        trip = trip_count(parent.operation)
        if trip is None or body != parent.operation.regions[1].blocks[0]:
            return False
        if int_of(again) is not None or not same_counter(
            first, body.arguments[trip[0]]
        ):
            return False
        slot = self.hops.slots.setdefault(
            parent.operation.results[0], loop_invariant(again)
        )
        return slot == loop_invariant(again)


def _adds_units(op) -> bool:
    """Returns whether an operation adds or drops dimensions of size 1, no more."""
    if op.operation.name == "stablehlo.transpose" or not keeps_order(op):
        return False
    shapes = shape_of(op.operands[0]), shape_of(op.results[0])
    inner, outer = ([size for size in shape if size != 1] for shape in shapes)
    return inner == outer


def _same_attributes(one, two) -> bool:
    left, right = one.operation.attributes, two.operation.attributes
    names = set(_names(left))
    return names == set(_names(right)) and all(
        left[name] == right[name] for name in names
    )


def _names(attributes) -> list[str]:
    # some versions of the bindings iterate over names, others over both
    return [one if isinstance(one, str) else one.name for one in attributes]
