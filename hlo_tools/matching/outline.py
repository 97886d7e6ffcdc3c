"""Moves a proven site into a private function behind a composite.

The operations are moved unchanged, so an outlined module means exactly what it
meant before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, stablehlo

from hlo_tools.matching.reader import defining_op, loop_invariant

_ALWAYS_INSIDE = ("stablehlo.constant", "stablehlo.iota")


class Region:
    """The operations between some inputs and an output.

    Args:
      out: the value computed.
      inputs: values to stop at, in operand order.
      members: values that belong to the region.

    Attributes:
      operands: `inputs`, then whatever else the region reads.
      values: the values computed inside, operands before users.
    """

    def __init__(self, out, inputs: Sequence[Any], members: set):
        self.out, self.members = out, members
        self.operands = list(inputs)
        self._boundary = set(inputs)
        self.values: list[Any] = []
        self._seen: set = set()
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
        location = defining_op(self.out).operation.location
        types = [value.type for value in self.operands]
        with ir.InsertionPoint(block), location:
            function = func.FuncOp(name, (types, [self.out.type]), visibility="private")
            body = function.add_entry_block()
        mapping = dict(zip(self.operands, body.arguments, strict=True))
        with ir.InsertionPoint(body), location:
            for value in self.values:
                op = defining_op(value).operation
                copy = op.clone()
                for number, operand in enumerate(op.operands):
                    copy.operands[number] = mapping[loop_invariant(operand)]
                mapping[value] = copy.results[0]
            func.ReturnOp([mapping[self.out]])
        return function

    def replace_by_composite(
        self, name: str, function_name: str, attributes: dict[str, ir.Attribute]
    ) -> ir.OpView:
        """Puts a composite in the place of the output; the old ops stay, unused."""
        anchor = defining_op(self.out).operation
        with ir.InsertionPoint(anchor), anchor.location:
            composite = stablehlo.CompositeOp(
                [self.out.type],
                self.operands,
                name,
                ir.FlatSymbolRefAttr.get(function_name),
                composite_attributes=ir.DictAttr.get(attributes),
                version=1,
            )
        self.out.replace_all_uses_with(composite.results[0])
        return composite

    def users_outside(self, values: set) -> list[Any]:
        """Returns operations outside the region that use one of its `values`."""
        own = {defining_op(value).operation for value in values}
        return [
            use.owner.operation
            for value in values
            for use in value.uses
            if use.owner.operation not in own
        ]

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
