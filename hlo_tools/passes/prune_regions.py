"""prune-regions: unused results of branches, reductions and sorts; fixed loop values.

A loop's value that the body hands on as it came in is the value before the loop: it
is used directly, and carried no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jax.extend.mlir import ir

from hlo_tools import loops
from hlo_tools.passes.regions import (
    is_unused,
    operations,
    return_only,
    terminator,
    with_results,
)
from hlo_tools.rewriting import is_plain, walk

_BRANCHES = ("stablehlo.case", "stablehlo.if")
_REDUCE, _SORT = "stablehlo.reduce", "stablehlo.sort"


def _prune_branches(op: ir.Operation) -> bool:
    keep = [n for n, result in enumerate(op.results) if not is_unused(result)]
    if len(keep) == len(op.results) or len(op.attributes):
        return False
    if not keep:
        return False  # dce drops it, unless it has effects
    for region in op.regions:
        return_only(region.blocks[0], keep)
        loops.erase_unused(region.blocks[0])
    with_results(op, keep, list(op.operands))
    return True


def _depends(block: ir.Block, value: ir.Value) -> set[int]:
    """Returns the numbers of the block's arguments that a value is made of."""
    arguments: dict[Any, int] = {
        argument: n for n, argument in enumerate(block.arguments)
    }
    found, pending, seen = set(), [value], set()
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in arguments:
            found.add(arguments[one])
        elif not isinstance(one.owner, ir.Block):
            pending.extend(loops.reads(one.owner.operation))
    return found


def _prune_reduce(op: ir.Operation) -> bool:
    """Keeps the used results, and those whose elements they are made of."""
    count, block = len(op.results), op.regions[0].blocks[0]
    if count < 2 or not is_plain(op):
        return False
    returned = list(terminator(block).operands)
    keep = {n for n, result in enumerate(op.results) if not is_unused(result)}
    pending = list(keep)
    while pending:
        found = {n % count for n in _depends(block, returned[pending.pop()])}
        pending += found - keep
        keep |= found
    return _rebuild(op, sorted(keep), count, 2) if keep else False


def _rebuild(op: ir.Operation, keep: list[int], count: int, groups: int) -> bool:
    """Drops the operands, results and arguments that are not kept.

    Args:
      op: a reduce or sort.
      keep: numbers of the results that stay.
      count: the number of results.
      groups: how many arguments the block has for each, a reduce's standing in groups
        of `count`, a sort's side by side.
    """
    if len(keep) == count:
        return False
    block, is_sort = op.regions[0].blocks[0], op.name == _SORT
    if not is_sort:
        return_only(block, keep)
    loops.erase_unused(block)
    for place in reversed(range(count * groups)):
        number = place // groups if is_sort else place % count
        if number not in keep:
            block.erase_argument(place)
    rows = 1 if is_sort else groups
    operands = [op.operands[row * count + n] for row in range(rows) for n in keep]
    with_results(op, keep, operands)
    return True


def _prune_sort(op: ir.Operation) -> bool:
    count, block = len(op.results), op.regions[0].blocks[0]
    if count < 2 or not set(op.attributes.keys()) <= {"dimension", "is_stable"}:
        return False
    used = _depends(block, terminator(block).operands[0])
    keep = {n for n, result in enumerate(op.results) if not is_unused(result)}
    if not keep:
        return False
    return _rebuild(op, sorted(keep | {n // 2 for n in used}), count, 2)


def _release(op: ir.Operation) -> bool:
    """Uses values from before a loop directly where the loop only hands them on."""
    if len(op.attributes):  # a sharding of each value
        return False
    condition, body = (region.blocks[0] for region in op.regions)
    returned = list(terminator(body).operands)
    fixed = [n for n, value in enumerate(returned) if value == body.arguments[n]]
    if not fixed or len(fixed) == len(returned):
        return False
    for number in fixed:
        before = op.operands[number]
        op.results[number].replace_all_uses_with(before)
        for block in (condition, body):
            block.arguments[number].replace_all_uses_with(before)
        loops.set_handed_on(op, number, before)
    keep = [n for n in range(len(returned)) if n not in fixed]
    loops.rebuild(op, keep)
    return True


_PRUNE = {
    "stablehlo.case": _prune_branches,
    "stablehlo.if": _prune_branches,
    _REDUCE: _prune_reduce,
    _SORT: _prune_sort,
    loops.WHILE: _release,
}


@dataclass(frozen=True)
class PruneRegions:
    """Drops results that nothing uses, and loop values that never change."""

    name: ClassVar[str] = "prune-regions"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = (
        "unused results of branches, reductions, sorts; fixed values"
    )
    stands_alone: ClassVar[bool] = True

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        changed = False
        # Users stand below what they use; innermost first.
        for op in reversed(walk(module.module.operation, _PRUNE)):
            changed |= _PRUNE[op.name](op)
        for function in module.functions().values():
            for block in function.regions[0].blocks:
                if changed and len(operations(block)):
                    loops.erase_unused(block)
        return changed
