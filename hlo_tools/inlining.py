"""Inlines function calls and composites, with their source locations."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.mlir import ir

from hlo_tools import _jax
from hlo_tools.module import StableHloModule


def _symbol(op: ir.Operation, attribute: str) -> str:
    return ir.FlatSymbolRefAttr(op.attributes[attribute]).value


def is_inlinable(function: ir.OpView) -> bool:
    """Returns whether a function has one block that ends in a return."""
    blocks = list(function.regions[0].blocks)
    if len(blocks) != 1:
        return False
    return list(blocks[0].operations)[-1].operation.name == "func.return"


def _replace_by_body(op: ir.Operation, function: ir.OpView) -> None:
    with ir.InsertionPoint(op), op.location:
        results = _jax.inlined_func_call(function.operation, list(op.operands))
    for old, new in zip(op.results, results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


def inline_all(
    module: StableHloModule,
    op_name: str,
    attribute: str,
    wanted: Callable[[ir.Operation], bool] = lambda op: True,
) -> int:
    """Replaces operations that refer to a function by that function's body.

    Args:
      module: changed in place.
      op_name: "func.call" or "stablehlo.composite".
      attribute: the symbol attribute that names the function.
      wanted: which of the operations to inline.

    Returns:
      How many operations were replaced.  Callees are treated before callers;
      a recursive call is left alone.
    """
    functions = module.functions()
    calls: dict[str, list[ir.Operation]] = {name: [] for name in functions}
    for name, function in functions.items():

        def visit(op: ir.Operation, found=calls[name]) -> ir.WalkResult:
            if op.name == op_name and wanted(op):
                found.append(op)
            return ir.WalkResult.ADVANCE

        function.operation.walk(visit)
    state: dict[str, str] = {}
    replaced = 0

    def process(name: str) -> None:
        nonlocal replaced
        state[name] = "open"
        for op in calls[name]:
            callee = _symbol(op, attribute)
            if callee not in functions:
                continue
            if callee not in state:
                process(callee)
            if state[callee] == "done" and is_inlinable(functions[callee]):
                _replace_by_body(op, functions[callee])
                replaced += 1
        state[name] = "done"

    for name in functions:
        if name not in state:
            process(name)
    return replaced


def inline_composites(
    module: StableHloModule, wanted: Callable[[ir.Operation], bool]
) -> int:
    """Inlines the decomposition of the wanted composites; returns how many."""
    return inline_all(module, "stablehlo.composite", "decomposition", wanted)
