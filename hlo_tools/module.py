"""A handle on one StableHLO module: parse, print, verify, look around."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools.errors import MlirParseError

_DIAGNOSTIC = re.compile(r'"?(?P<file>[^"\n]*?)"?:(?P<line>\d+):(?P<column>\d+)')
# Frames of these packages are not the user's.
_LIBRARIES = (
    "/jax/", "/jaxlib/", "/flax/", "/equinox/", "/optax/", "/hlo_tools/",
    "/einops/", "/haiku/", "<frozen",
)  # fmt: skip


@dataclass(frozen=True)
class SourceLocation:
    """A line of the user's program."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@functools.cache
def parse_context() -> ir.Context:
    """Returns a context with every dialect that JAX lowers to."""
    return jax.jit(lambda: 0).lower().compiler_ir("stablehlo").context


class StableHloModule:
    """One StableHLO module, which passes change in place.

    Attributes:
      module: the MLIR module.
    """

    def __init__(self, module: ir.Module):
        self.module = module

    @classmethod
    def parse(cls, text: str | bytes, filename: str = "<string>") -> StableHloModule:
        """Parses MLIR text or bytecode.

        Raises:
          MlirParseError: with the place and MLIR's message.
        """
        context = parse_context()
        try:
            with context, ir.Location.unknown(context):
                if Path(filename).is_file() and isinstance(text, str):
                    # so that locations name the file
                    return cls(ir.Module.parseFile(filename))
                return cls(ir.Module.parse(text))
        except ir.MLIRError as error:
            raise _parse_error(error, filename) from None

    @classmethod
    def from_ir(cls, module: ir.Module) -> StableHloModule:
        """Returns a handle on a copy of `module`, in the same context."""
        with module.context:
            copy = ir.Module.create(module.operation.location)
            for name in module.operation.attributes:
                copy.operation.attributes[name] = module.operation.attributes[name]
            with ir.InsertionPoint(copy.body):
                for op in module.body.operations:
                    op.operation.clone()
            return cls(copy)

    @property
    def context(self) -> ir.Context:
        return self.module.context

    @property
    def name(self) -> str:
        """The module's symbol name, or "module"."""
        attributes = self.module.operation.attributes
        if "sym_name" not in attributes:
            return "module"
        return ir.StringAttr(attributes["sym_name"]).value

    @property
    def partitions(self) -> int:
        """Over how many devices XLA partitions the program."""
        attributes = self.module.operation.attributes
        if "mhlo.num_partitions" not in attributes:
            return 1
        return ir.IntegerAttr(attributes["mhlo.num_partitions"]).value

    def clone(self) -> StableHloModule:
        return StableHloModule.from_ir(self.module)

    def as_text(self, debug_info: bool = False) -> str:
        return str(self.module.operation.get_asm(enable_debug_info=debug_info))

    def verify(self) -> None:
        """Checks the module against its dialects.

        Raises:
          ir.MLIRError: it is malformed.
        """
        self.module.operation.verify()

    def functions(self) -> dict[str, ir.OpView]:
        """Returns the module's functions by name."""
        return {
            ir.StringAttr(op.attributes["sym_name"]).value: op
            for op in self.module.body.operations
            if op.operation.name == "func.func"
        }

    @property
    def main(self) -> ir.OpView:
        """The entry function: @main, else the first public one."""
        functions = self.functions()
        if "main" in functions:
            return functions["main"]
        for op in functions.values():
            if "sym_visibility" not in op.attributes:
                return op
        raise MlirParseError("<module>", 1, "the module has no public function")

    def walk(self, *names: str) -> list[ir.Operation]:
        """Returns all operations (of the given names), innermost first."""
        found: list[ir.Operation] = []

        def visit(op: ir.Operation) -> ir.WalkResult:
            if not names or op.name in names:
                found.append(op)
            return ir.WalkResult.ADVANCE

        self.module.operation.walk(visit)
        return found

    def op_count(self) -> int:
        """Returns the number of operations, functions and returns not counted."""
        ignored = {"builtin.module", "func.func", "func.return", "stablehlo.return"}
        advance, count = ir.WalkResult.ADVANCE, 0

        def visit(op: ir.Operation) -> ir.WalkResult:
            nonlocal count
            if op.name not in ignored:
                count += 1
            return advance

        self.module.operation.walk(visit)
        return count


def drop_shardings(root: ir.Operation) -> None:
    """Removes sharding annotations below `root`, which name meshes of a module.

    What is taken out of a program to be looked at or to be run by itself is a program
    for one device, where an annotation does nothing.

    Args:
      root: changed in place.
    """
    constraints: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "sdy.sharding_constraint":
            constraints.append(op)
        elif "sdy.sharding" in op.attributes:
            del op.attributes["sdy.sharding"]
        return ir.WalkResult.ADVANCE

    root.walk(visit)
    for op in constraints:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()


def _parse_error(error: ir.MLIRError, filename: str) -> MlirParseError:
    for diagnostic in error.error_diagnostics:
        found = _DIAGNOSTIC.search(str(diagnostic.location))
        line = int(found["line"]) if found else 1
        return MlirParseError(filename, line, diagnostic.message)
    return MlirParseError(filename, 1, str(error).splitlines()[0])


def _frames(location: ir.Location) -> Iterator[tuple[str, int, str]]:
    """Yields (file, line, function), innermost first."""
    stack: list[tuple[Any, str]] = [(location, "")]
    while stack:
        here, function = stack.pop()
        if isinstance(here, ir.CallSiteLoc):
            stack.append((here.caller, ""))
            stack.append((here.callee, ""))
        elif isinstance(here, ir.NameLoc):
            stack.append((here.child_loc, here.name_str))
        elif isinstance(here, ir.FusedLoc):
            stack.extend((part, "") for part in reversed(here.locations))
        elif isinstance(here, ir.FileLineColLoc):
            yield str(here.filename), here.start_line, function


def source_location(op: ir.Operation | ir.OpView) -> SourceLocation | None:
    """Returns the line of the user's program that `op` comes from.

    The innermost frame that is neither JAX's nor a model library's; if all are,
    the innermost one.
    """
    first = None
    for file, line, function in _frames(op.operation.location):
        here = SourceLocation(file, line, function)
        first = first or here
        path = Path(file).as_posix()
        if not any(part in path for part in _LIBRARIES):
            return here
    return first


stablehlo.register_stablehlo_passes()
