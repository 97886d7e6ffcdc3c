"""StableHLO modules as HLO: the one adapter between the two.

XLA translates the module, as it does before it compiles one. What can not be said in
HLO (dynamic shapes) is read operation by operation instead, under StableHLO's names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from jax.extend.mlir import ir

from hlo_tools import _jax
from hlo_tools.hlo.ir import HloComputation, HloInstruction, HloModule
from hlo_tools.hlo.parser import parse_text
from hlo_tools.hlo.shapes import Shape
from hlo_tools.module import StableHloModule, source_location

_ELEMENT_TYPES = {"i1": "pred", "index": "s64", "complex<f32>": "c64"}
_ELEMENT_TYPES |= {"complex<f64>": "c128", "none": "token"}
_DIALECTS = ("stablehlo.", "chlo.", "func.", "sdy.")
_RETURNS = ("func.return", "stablehlo.return", "sdy.return")
_CONSTANT = "stablehlo.constant"


def from_stablehlo(
    module: StableHloModule, filename: str = "", translate: bool = True
) -> HloModule:
    """The IR of a StableHLO module.

    Args:
        module: left as it is.
        filename: for messages.
        translate: whether XLA may translate it; else, and where it can not, opcodes
            and attributes are StableHLO's.
    """
    if translate:
        try:
            text = _jax.stablehlo_as_hlo_text(module.as_text(debug_info=True))
        except RuntimeError:  # XlaRuntimeError, with what can not be said
            pass
        else:
            return parse_text(text, filename)
    return _Walk(module, filename).module


@dataclass
class _Scope:
    """A computation that is being read.

    Attributes:
        computation: so far.
        known: names of the values in it.
        captures: values of the scope around it that it uses; each is a parameter
            after its own ones.
    """

    computation: HloComputation
    known: dict[Any, str] = field(default_factory=dict)
    captures: list[Any] = field(default_factory=list)

    def name(self, value: Any) -> str:
        if value not in self.known:
            number = len(self.computation.parameters)
            self.captures.append(value)
            self.add_parameter(value, f"captured{number}", number)
        return self.known[value]

    def add_parameter(self, value: Any, name: str, number: int) -> None:
        self.known[value] = name
        shape = _shape([value])
        self.add(HloInstruction(name, shape, "parameter", (), str(number)))

    def add(self, instruction: HloInstruction) -> None:
        self.computation.instructions.append(instruction)


class _Walk:
    """Reads a module operation by operation."""

    def __init__(self, module: StableHloModule, filename: str):
        self.module = HloModule(module.name, filename=filename)
        main = module.main.operation
        for function in module.functions().values():
            if function.regions[0].blocks:  # else a declaration
                name = ir.StringAttr(function.attributes["sym_name"]).value
                scope = self.add_block(name, function.regions[0].blocks[0])
                scope.computation.is_entry = function.operation == main
        self.module.link()

    def add_block(self, name: str, block: Any) -> _Scope:
        """Adds a computation for `block`."""
        scope = _Scope(HloComputation(name))
        for number, argument in enumerate(block.arguments):
            scope.add_parameter(argument, f"arg{number}", number)
        for op in block.operations:
            if op.operation.name in _RETURNS:
                self.add_return(scope, op.operation)
            else:
                self.add_operation(scope, op.operation)
        self.module.computations.append(scope.computation)
        return scope

    def add_operation(self, scope: _Scope, op: Any) -> None:
        opcode = op.name
        for prefix in _DIALECTS:
            opcode = opcode.removeprefix(prefix)
        name = f"{opcode}.{len(scope.computation)}"
        operands = [scope.name(value) for value in op.operands]
        attributes = {a: _quoted(str(op.attributes[a])) for a in op.attributes}
        payload = ""
        if op.name == _CONSTANT:
            del attributes["value"]
            payload = str(op.attributes["value"])
        if op.regions:
            names, captures = self.add_regions(f"{scope.computation.name}.{name}", op)
            attributes["called_computations"] = names
            operands += [scope.name(value) for value in captures]
        if "callee" in attributes:
            del attributes["callee"]
            callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
            attributes["to_apply"] = f"%{callee}"
        if metadata := _metadata(op):
            attributes["metadata"] = metadata
        shape = _shape(op.results)
        scope.add(
            HloInstruction(name, shape, opcode, tuple(operands), payload, attributes)
        )
        if len(op.results) == 1:
            scope.known[op.results[0]] = name
            return
        for index, result in enumerate(op.results):
            scope.known[result] = f"{name}.{index}"
            element, shape = {"index": str(index)}, _shape([result])
            scope.add(
                HloInstruction(
                    scope.known[result],
                    shape,
                    "get-tuple-element",
                    (name,),
                    attributes=element,
                )
            )

    def add_regions(self, name: str, op: Any) -> tuple[str, list[Any]]:
        """Adds a computation for each region.

        Returns:
            Their names, and the values around the operation that they use.
        """
        names, captures = [], []
        for number, region in enumerate(op.regions):
            for block in region.blocks:
                names.append(f"%{name}.region{number}")
                scope = self.add_block(names[-1][1:], block)
                captures += scope.captures
        return f"{{{', '.join(names)}}}", captures

    def add_return(self, scope: _Scope, op: Any) -> None:
        names = tuple(scope.name(value) for value in op.operands)
        if len(names) == 1:
            root = next(i for i in scope.computation if i.name == names[0])
            root.is_root = True
            return
        root = HloInstruction(
            "return", _shape(op.operands), "tuple", names, is_root=True
        )
        scope.add(root)


_PLAIN = re.compile(r"[\w.\-+]+|\{[\w,]*\}")


def _quoted(text: str) -> str:
    """An attribute's text as HLO takes it: a string, unless it is a word."""
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _metadata(op: Any) -> str:
    """The operation's location as HLO metadata, or ""."""
    parts = []
    location = op.location
    if isinstance(location, ir.NameLoc):
        parts.append(f"op_name={_string(location.name_str)}")
    source = source_location(op)
    if source is not None:
        parts.append(f"source_file={_string(source.file)} source_line={source.line}")
    return f"{{{' '.join(parts)}}}" if parts else ""


def _string(text: str) -> str:
    quoted = _quoted(text)
    return quoted if quoted.startswith('"') else f'"{quoted}"'


def _shape(values: Any) -> Shape:
    shapes = tuple(_shape_of_type(value.type) for value in values)
    return shapes[0] if len(shapes) == 1 else Shape("tuple", elements=shapes)


def _shape_of_type(kind: Any) -> Shape:
    try:
        array = ir.RankedTensorType(kind)
    except ValueError:
        name = str(kind).rpartition("!stablehlo.")[2]
        return Shape(name if name.isidentifier() else "opaque")
    dynamic = tuple(array.is_dynamic_dim(i) for i in range(array.rank))
    sizes = tuple(
        -1 if loose else array.get_dim_size(i) for i, loose in enumerate(dynamic)
    )
    return Shape(
        _element_type(str(array.element_type)), sizes, dynamic if any(dynamic) else ()
    )


def _element_type(name: str) -> str:
    if name in _ELEMENT_TYPES:
        return _ELEMENT_TYPES[name]
    if name.startswith("ui") and name[2:].isdigit():
        return f"u{name[2:]}"
    if name[:1] == "i" and name[1:].isdigit():
        return f"s{name[1:]}"
    return name.lower() if name.replace("_", "").isalnum() else "opaque"
