"""Moves a proven site into a private function behind a composite.

The operations are moved unchanged, so an outlined module means exactly what it
meant before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, stablehlo

from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.reader import (
    defining_op,
    int_array,
    loop_invariant,
)

_ALWAYS_INSIDE = ("stablehlo.constant", "stablehlo.iota")
# operations with regions that read nothing but their operands
_MOVABLE = ("stablehlo.reduce",)


def clone_into(value, mapping: dict) -> None:
    """Clones the operation of `value` at the insertion point, operands mapped."""
    op = defining_op(value).operation
    copy = op.clone()
    for number, operand in enumerate(op.operands):
        copy.operands[number] = mapping[loop_invariant(operand)]
    mapping[value] = copy.results[0]


def undone(op, value):
    """Applies the inverse of a shape operation that repeats nothing."""
    if op.operation.name == "stablehlo.transpose":
        permutation = int_array(op.attributes["permutation"])
        inverse = [permutation.index(dim) for dim in range(len(permutation))]
        return stablehlo.TransposeOp(value, inverse).result
    return stablehlo.ReshapeOp(op.operands[0].type, value).result


def hoist(values: Sequence[Any], first: ir.Operation, own: set) -> None:
    """Moves up what computes some values, to before an operation.

    Args:
      values: of its block, or of blocks around it.
      first: the operation.
      own: results that only exist from there on.

    Raises:
      NoMatchError: one of the values depends on them.
    """
    moved: list[ir.Operation] = []
    seen: set = set()

    def need(value) -> None:
        op = defining_op(value)
        if op is None or value in seen:
            return
        seen.add(value)
        op = op.operation
        if op.block != first.block or op.is_before_in_block(first):
            return
        if value in own or (list(op.regions) and op.name not in _MOVABLE):
            raise NoMatchError("an operand depends on the gradients")
        for operand in op.operands:
            need(operand)
        if op.results[0] not in {m.results[0] for m in moved}:
            moved.append(op)

    for value in values:
        need(value)
    for op in moved:
        op.move_before(first)


class Region:
    """The operations between some inputs and some outputs.

    Args:
      outs: the values computed.
      inputs: values to stop at, in operand order.
      members: values that belong to the region.

    Attributes:
      operands: `inputs`, then whatever else the region reads.
      values: the values computed inside, operands before users.
    """

    def __init__(self, outs: Sequence[Any], inputs: Sequence[Any], members: set):
        self.outs, self.members = list(outs), members
        self.operands = list(inputs)
        self._boundary = set(inputs)
        self.values: list[Any] = []
        self._seen: set = set()
        for out in outs:
            self._visit(out)

    def _visit(self, value) -> None:
        value = loop_invariant(value)
        if value in self._seen or value in self._boundary:
            return
        op = defining_op(value)
        inside = op is not None and (
            value in self.members or op.operation.name in _ALWAYS_INSIDE
        )
        if not inside:
            self._boundary.add(value)
            self.operands.append(value)
            return
        self._seen.add(value)
        for operand in op.operands:
            self._visit(operand)
        self.values.append(value)

    def build_function(self, name: str, block: ir.Block) -> ir.OpView:
        """Writes the region as a private function at the end of `block`."""
        location = defining_op(self.outs[0]).operation.location
        types = [value.type for value in self.operands]
        results = [out.type for out in self.outs]
        with ir.InsertionPoint(block), location:
            function = func.FuncOp(name, (types, results), visibility="private")
            body = function.add_entry_block()
        mapping = dict(zip(self.operands, body.arguments, strict=True))
        with ir.InsertionPoint(body), location:
            for value in self.values:
                clone_into(value, mapping)
            func.ReturnOp([mapping[out] for out in self.outs])
        return function

    def replace_by_composite(
        self,
        anchor: ir.Operation,
        name: str,
        function_name: str,
        attributes: dict[str, ir.Attribute],
    ) -> ir.OpView:
        """Puts a composite before `anchor`; the old operations stay, unused."""
        with ir.InsertionPoint(anchor), anchor.location:
            composite = stablehlo.CompositeOp(
                [out.type for out in self.outs],
                self.operands,
                name,
                ir.FlatSymbolRefAttr.get(function_name),
                composite_attributes=ir.DictAttr.get(attributes),
                version=1,
            )
        for out, result in zip(self.outs, composite.results, strict=True):
            out.replace_all_uses_with(result)
        return composite

    def place(self) -> ir.Operation:
        """Returns the operation to put the composite before.

        That is the first output; what it needs and stands further down is moved up.

        Raises:
          NoMatchError: an operand depends on one of the outputs.
        """
        outs = [defining_op(out).operation for out in self.outs]
        first = outs[0]
        for op in outs[1:]:
            if op.is_before_in_block(first):
                first = op
        hoist(self.operands, first, set(self.values))
        return first

    def depending_on(self, source) -> set:
        """Returns the values of the region computed from `source`."""
        found = {source}
        for value in self.values:
            if any(loop_invariant(o) in found for o in defining_op(value).operands):
                found.add(value)
        return found


def erase_dead(regions: Sequence[Region]) -> list[set]:
    """Erases the operations of replaced regions that nothing uses any more.

    Returns:
      For each region the values that live on.
    """
    alive = [set(region.values) for region in regions]
    erased: set = set()
    changed = True
    while changed:
        changed = False
        for region, living in zip(regions, alive, strict=True):
            living -= erased
            for value in reversed(region.values):
                if value in living and not list(value.uses):
                    op = defining_op(value).operation
                    if len(op.results) == 1:
                        living.discard(value)
                        erased.add(value)
                        op.erase()
                        changed = True
    return alive
