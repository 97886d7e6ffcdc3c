"""Proves an outlined attention and its outlined backward pass together.

The backward composite reads values that the forward pass computed, directly or from
what a loop saved. Both decompositions, and what lies between them, are copied into
one function of plain arrays, and the site is matched there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import func

from hlo_tools.matching.attention import match_attention
from hlo_tools.matching.canonical import CanonicalSite
from hlo_tools.matching.canonical_grad import CanonicalGradient
from hlo_tools.matching.hops import BARRIER, READ, Hops, keeps_order
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.outline import clone_into, undone
from hlo_tools.matching.products import value_products
from hlo_tools.matching.reader import (
    ELEMENTWISE,
    SHAPE_OPS,
    defining_op,
    loop_invariant,
    result_number,
)
from hlo_tools.matching.twins import Twins
from hlo_tools.module import drop_shardings

_COPIED = (
    ELEMENTWISE
    | SHAPE_OPS
    | {
        "stablehlo.constant",
        "stablehlo.iota",
        "stablehlo.reduce",
        "stablehlo.dot_general",
    }
)
# A forward pass and what it saves; more means that this is not what is read.
_MOST_COPIED = 400


@dataclass
class JointSite:
    """A proven pair, in the terms of one function of both.

    Attributes:
      site: the forward pass.
      gradient: the backward pass.
      places: which argument of the function each of `site.values` is.
      dout: the argument that is the cotangent; None if that is a constant.
      order: for each result of the backward composite, which of the gradients.
      function: of all arguments, to (out, *results of the backward composite).
      text: that function's module.
    """

    site: CanonicalSite
    gradient: CanonicalGradient
    places: list[int]
    dout: int | None
    order: list[int]
    function: ir.OpView
    text: str


@dataclass
class Arguments:
    """What the arguments of the function of both are in the program.

    Attributes:
      values: operands of the forward composite, then others of the backward one.
      forward: how many are the forward composite's.
      hops: which loops were followed, at which slots.
      again: operand of the forward composite -> what the backward pass has for it.
    """

    values: list[Any]
    forward: int
    hops: Hops
    again: dict[int, Any] = field(default_factory=dict)


class _Copier:
    """Copies the forward pass into the function of both, as the backward sees it."""

    def __init__(self, forward: ir.Operation | None, hops: Hops):
        self.hops = hops
        self.known: dict[Any, int] = {}  # values that are operands of the forward
        self.below: dict[Any, tuple[int, list]] = {}  # what they rearrange, and how
        if forward is not None:
            for number, operand in enumerate(forward.operands):
                for form in self._forms(operand):
                    self.known.setdefault(form, number)
                    self._note_rearranged(form, number)
        self.out = None if forward is None else forward.results[0]
        self.twins = Twins()
        self.operands = [] if forward is None else list(forward.operands)
        self._copied: dict[Any, bool] = {}

    def _note_rearranged(self, value, number: int) -> None:
        """Remembers the arrays that an operand is a mere rearrangement of."""
        path: list = []
        while (op := defining_op(value)) is not None and keeps_order(op):
            path = [*path, op]
            value = loop_invariant(op.operands[0])
            self.below.setdefault(value, (number, path))

    def _forms(self, value) -> list[Any]:
        """Returns the values that `value` is equal to, nearest first."""
        forms = [value]
        while True:
            value = loop_invariant(value)
            if value != forms[-1]:
                forms.append(value)
            op = defining_op(value)
            if op is None:
                return forms
            name = op.operation.name
            if name == BARRIER:
                value = op.operands[result_number(value)]
            elif name == READ and (found := self.hops.read_stack(op)) is not None:
                self.hops.note(*found)
                value = found[0].update
            else:
                return forms
            forms.append(value)

    def resolve(self, value) -> tuple[Any, int | None]:
        """Returns (the value to copy, None) or (value, number of the operand)."""
        forms = self._forms(value)
        for form in forms:
            if form in self.known:
                return form, self.known[form]
            if form in self.below:
                return form, None
        number = self.twin_of(forms[-1])
        return forms[-1] if number is None else self.operands[number], number

    def twin_of(self, value) -> int | None:
        """Returns which of the forward's operands a value is once more, if any."""
        for number, operand in enumerate(self.operands):
            if operand != value and self.twins.are(operand, value):
                self.hops.note_slots(self.twins.hops.slots)
                return number
        return None

    def can_copy(self, value) -> bool:
        """Returns whether a value is computed from the forward's operands alone."""
        value, number = self.resolve(value)
        if number is not None or value in self.below:
            return True
        found = self._copied.get(value)
        if found is None:
            self._copied[value] = False
            op = defining_op(value)
            found = (
                op is not None
                and op.operation.name in _COPIED
                and len(self._copied) < _MOST_COPIED
                and all(self.can_copy(operand) for operand in op.operands)
            )
            self._copied[value] = found
        return found

    def copy(self, value, mapping: dict):
        """Returns the copy of a value at the insertion point."""
        original = value
        value, number = self.resolve(value)
        if number is not None:
            mapping[original] = mapping[number]
        elif value in self.below and value not in mapping:
            number_below, path = self.below[value]
            array = mapping[number_below]
            for op in path:
                array = undone(op, array)
            mapping[value] = array
        elif value not in mapping:
            op = defining_op(value)
            for operand in op.operands:
                self.copy(operand, mapping)
            for operand in op.operands:
                mapping[loop_invariant(operand)] = mapping[operand]
            clone_into(value, mapping)
        if number is None:
            mapping[original] = mapping[value]
        return mapping[original]


def joint_module(
    functions: dict[str, ir.OpView], forward: ir.Operation | None, backward
) -> tuple[ir.Module, Arguments]:
    """Writes the function of both.

    Args:
      functions: the module's, by name.
      forward, backward: the composites; `forward` is None if the backward pass
        computes the probabilities anew.

    Returns:
      A module with the one function, and its arguments in the program.

    Raises:
      NoMatchError: two slots of one loop are mixed.
    """
    copier = _Copier(forward, Hops())
    values = [] if forward is None else list(forward.operands)
    count = len(values)
    saved = []
    arguments = Arguments(values, count, copier.hops)
    for operand in backward.operands:
        linked = forward is not None and (
            copier.resolve(operand)[0] == copier.out or copier.can_copy(operand)
        )
        saved.append(linked)
        number = copier.twin_of(operand) if linked else None
        if number is not None:
            arguments.again[number] = operand
        if not linked:
            values.append(operand)
    context = backward.context
    with context, ir.Location.unknown(context):
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            types = [value.type for value in values]
            results = [r.type for r in backward.results]
            if forward is not None:
                results = [forward.results[0].type, *results]
            function = func.FuncOp("main", (types, results))
            body = function.add_entry_block()
        with ir.InsertionPoint(body):
            # one array in two places, such as shared keys and values, is one argument
            firsts: dict = {}
            inputs = [
                firsts.setdefault(value, argument)
                for value, argument in zip(values, body.arguments, strict=True)
            ]
            mapping: dict = dict(enumerate(inputs))
            outs = []
            if forward is not None:
                inputs = inputs[:count]
                outs = _copy_body(functions[_callee(forward)], inputs)
                mapping[forward.results[0]] = outs[0]
            rest = iter(list(body.arguments)[count:])
            operands = [
                copier.copy(operand, mapping) if linked else next(rest)
                for operand, linked in zip(backward.operands, saved, strict=True)
            ]
            outs = [*outs, *_copy_body(functions[_callee(backward)], operands)]
            func.ReturnOp(outs)
        drop_shardings(module.operation)
        passmanager.PassManager.parse("builtin.module(cse)").run(module.operation)
    return module, arguments


def _callee(composite) -> str:
    return ir.FlatSymbolRefAttr(composite.attributes["decomposition"]).value


def _copy_body(function: ir.OpView, inputs: Sequence[Any]) -> list[Any]:
    block = function.regions[0].blocks[0]
    mapping = dict(zip(block.arguments, inputs, strict=True))
    operations = list(block.operations)
    for op in operations[:-1]:
        copy = op.operation.clone()
        for number, operand in enumerate(op.operands):
            copy.operands[number] = mapping[operand]
        for old, new in zip(op.operation.results, copy.results, strict=True):
            mapping[old] = new
    return [mapping[value] for value in operations[-1].operands]


def prove_joint(module: ir.Module) -> JointSite:
    """Matches the function of both.

    Raises:
      NoMatchError: it is no attention and its gradients.
    """
    function = next(iter(module.body.operations))
    block = function.regions[0].blocks[0]
    returned = list(list(block.operations)[-1].operands)
    reason = ""
    for op in block.operations:
        if op.operation.name != "stablehlo.exponential":
            continue
        for dot, side in value_products(op):
            try:
                match = match_attention(dot, side, op)
            except NoMatchError as error:
                reason = reason or error.reason
                continue
            if match.out != returned[0]:
                continue
            if len(match.gradients) != 1:
                reason = f"it has {len(match.gradients)} backward passes"
                continue
            try:
                site = CanonicalSite(match)
                gradient = CanonicalGradient(site, match.gradients[0])
                return _joint_site(module, function, returned, site, gradient)
            except NoMatchError as error:
                reason = error.reason
    raise NoMatchError(reason or "its result is no attention of its arguments")


def _joint_site(module, function, returned, site, gradient) -> JointSite:
    outputs = [output.value for output in gradient.match.outputs]
    order = []
    for value in returned[1:]:
        if value not in outputs:
            raise NoMatchError("a result is none of the proven gradients")
        order.append(outputs.index(value))
    places = []
    for value in site.values:
        if not isinstance(value.owner, ir.Block):
            raise NoMatchError("an operand is computed inside")
        places.append(ir.BlockArgument(value).arg_number)
    dout = gradient.match.dout.value
    number: int | None = None
    if isinstance(dout.owner, ir.Block):
        number = ir.BlockArgument(dout).arg_number
    elif dout.owner.operation.name != "stablehlo.constant":
        raise NoMatchError("the cotangent is computed inside")
    text = str(module.operation.get_asm())
    return JointSite(site, gradient, places, number, order, function, text)
