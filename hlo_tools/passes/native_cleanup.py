"""Inlining, common subexpressions and dead code, by MLIR's own passes where they do.

MLIR's inliner has no interface for the `func` dialect in the contexts that JAX makes
(it runs, and inlines nothing), so calls are inlined in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jax.extend.mlir import ir, passmanager

from hlo_tools.inlining import inline_all
from hlo_tools.rewriting import KERNEL_PREFIX, REQUIRED_ATTRIBUTES

# A mark that makes operations differ, so that they are not merged.
_MARK = "hlo_tools.keep_apart"
# Barriers exist to keep equal computations apart (jax.checkpoint); a custom call may
# mean anything.
_NEVER_MERGED = frozenset(
    {"stablehlo.optimization_barrier", "stablehlo.custom_call", "stablehlo.composite"}
)
_NEVER_EQUAL = frozenset({"builtin.module", "func.func"})
# Attributes of functions and their arguments that inlining may drop: they describe
# the function, or are for the entry point only.
_FUNCTION_ATTRIBUTES = frozenset(
    {"sym_name", "sym_visibility", "function_type", "arg_attrs", "res_attrs"}
)


def _run_native(module: Any, pipeline: str) -> None:
    with module.context, ir.Location.unknown(module.context):
        manager = passmanager.PassManager.parse(f"builtin.module({pipeline})")
        manager.enable_verifier(False)
        manager.run(module.module.operation)


def _count(module: Any) -> int:
    count = 0

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal count
        count += 1
        return ir.WalkResult.ADVANCE

    module.module.operation.walk(visit)
    return count


def _is_plain_function(function: ir.OpView) -> bool:
    """Returns whether a function has no attribute that its body would lose."""
    attributes = function.operation.attributes
    if not _FUNCTION_ATTRIBUTES.issuperset(attributes.keys()):
        return False
    for name in ("arg_attrs", "res_attrs"):
        if name in attributes and any(
            len(ir.DictAttr(a)) for a in ir.ArrayAttr(attributes[name])
        ):
            return False
    return True


@dataclass(frozen=True)
class InlineCalls:
    """Inlines calls of private functions, except those that carry annotations."""

    name: ClassVar[str] = "inline-calls"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "inline calls of the module's own functions"

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        plain = {
            name
            for name, function in module.functions().items()
            if _is_plain_function(function)
        }

        def wanted(call: ir.Operation) -> bool:
            callee = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
            # What is bound stays: a second run of a pipeline changes nothing.
            if callee.startswith(KERNEL_PREFIX):
                return False
            return callee in plain and set(call.attributes.keys()) == {"callee"}

        return inline_all(module, "func.call", "callee", wanted) > 0


@dataclass(frozen=True)
class Cse:
    """Merges equal operations; annotated ones and barriers stay apart."""

    name: ClassVar[str] = "cse"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "merge equal operations, drop unused ones"

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        before = _count(module)
        marked = _mark(module.module.operation)
        try:
            _run_native(module, "cse")
        finally:
            if marked:
                _unmark(module.module.operation)
        return _count(module) != before


def _mark(root: ir.Operation) -> int:
    """Makes each operation that must not be merged unlike any other."""
    count = 0
    with root.context:
        i64 = ir.IntegerType.get_signless(64)

        def visit(op: ir.Operation) -> ir.WalkResult:
            nonlocal count
            name, attributes = op.name, op.attributes
            extra = len(attributes) > REQUIRED_ATTRIBUTES.get(name, 0)
            annotated = (
                extra
                and name not in _NEVER_EQUAL
                and any("." in key for key in attributes.keys())
            )
            if annotated or name in _NEVER_MERGED:
                attributes[_MARK] = ir.IntegerAttr.get(i64, count)
                count += 1
            return ir.WalkResult.ADVANCE

        root.walk(visit)
    return count


def _everything(root: ir.Operation) -> list[ir.Operation]:
    """Returns all operations, those of kernels included."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        found.append(op)
        return ir.WalkResult.ADVANCE

    root.walk(visit)
    return found


def _unmark(root: ir.Operation) -> None:
    for op in _everything(root):
        if len(op.attributes) and _MARK in op.attributes:
            del op.attributes[_MARK]


@dataclass(frozen=True)
class Dce:
    """Drops operations without effects that nobody uses, and unused functions."""

    name: ClassVar[str] = "dce"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "drop unused operations and functions"

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        before = _count(module)
        _run_native(module, "func.func(trivial-dce),symbol-dce")
        return _count(module) != before
