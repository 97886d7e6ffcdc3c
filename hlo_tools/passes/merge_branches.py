"""merge-branches: branches and loops whose course is known, and what branches share.

A case with a constant index becomes its branch, one whose branches are all alike any
of them; an operation that every branch does goes in front, as it is run once either
way. A loop that never runs becomes its initial values, one that runs once its body.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.extend.mlir import ir

from hlo_tools import loops
from hlo_tools.matching.hops import trip_count
from hlo_tools.passes.constant_values import read_constant
from hlo_tools.passes.regions import inline_region, is_within, operations, terminator
from hlo_tools.rewriting import walk

_BRANCHES = ("stablehlo.case", "stablehlo.if")


def _chosen(op: ir.Operation) -> int | None:
    """Returns which branch a constant chooses."""
    index = read_constant(op.operands[0], 1)
    if index is None:
        return None
    if op.name == "stablehlo.if":
        return 0 if index else 1
    number = int(index.reshape(()))
    # An index out of range chooses the last branch.
    return number if 0 <= number < len(op.regions) else len(op.regions) - 1


def _text(region: ir.Region) -> str:
    """Returns a region's text; values of the outside have the same names in each."""
    names: dict[Any, str] = {}
    return "\n".join(_lines(region.blocks[0], names))


def _lines(block: ir.Block, names: dict[Any, str]) -> Iterable[str]:
    for value in block.arguments:
        names[value] = f"v{len(names)}"
    for op in operations(block):
        operands = [names.get(value, f"o{hash(value)}") for value in op.operands]
        kinds = [str(result.type) for result in op.results]
        for result in op.results:
            names[result] = f"v{len(names)}"
        yield f"{op.name}{operands}{_attributes(op)}{kinds}"
        for region in op.regions:
            for inner in region.blocks:
                yield "{"
                yield from _lines(inner, names)
                yield "}"


def _attributes(op: ir.Operation) -> str:
    # A constant's attribute can not always be read by itself, its text can.
    if op.name == "stablehlo.constant":
        return str(op).partition("=")[2]
    return str([(key, str(op.attributes[key])) for key in sorted(op.attributes.keys())])


def _all_alike(op: ir.Operation) -> bool:
    counts = {len(operations(region.blocks[0])) for region in op.regions}
    if len(counts) != 1:
        return False
    return len({_text(region) for region in op.regions}) == 1


def _key(op: ir.Operation) -> Any:
    """Returns what makes two operations the same; None where that is not told."""
    if len(op.regions) or not loops.is_pure(op) or not len(op.results):
        return None
    if op.name in ("stablehlo.optimization_barrier", "stablehlo.composite"):
        return None
    kinds = tuple(str(result.type) for result in op.results)
    return op.name, tuple(op.operands), _attributes(op), kinds


def hoist_shared(op: ir.Operation) -> bool:
    """Moves what every branch does in front; returns whether anything was moved."""
    changed = False
    first, *others = [region.blocks[0] for region in op.regions]
    for one in operations(first)[:-1]:
        key = None
        if not any(is_within(value, op) for value in one.operands):
            key = _key(one)
        if key is None:
            continue
        twins = [_find(block, key) for block in others]
        if any(twin is None for twin in twins):
            continue
        if one.name == "stablehlo.constant":
            continue  # nothing is saved, and it would have to be passed in
        one.move_before(op)
        for twin in twins:
            for old, new in zip(twin.results, one.results, strict=True):
                old.replace_all_uses_with(new)
            twin.erase()
        changed = True
    return changed


def _find(block: ir.Block, key: Any) -> ir.Operation | None:
    for op in operations(block)[:-1]:
        if op.name == key[0] and _key(op) == key:
            return op
    return None


def _replace_shared_results(op: ir.Operation) -> bool:
    """Uses what all branches return, where that is one value of the outside."""
    changed = False
    lasts = [terminator(region.blocks[0]) for region in op.regions]
    for number, result in enumerate(op.results):
        values = {last.operands[number] for last in lasts}
        if len(values) != 1 or next(iter(result.uses), None) is None:
            continue
        (value,) = values
        if not is_within(value, op):
            result.replace_all_uses_with(value)
            changed = True
    return changed


def _branch(op: ir.Operation) -> bool:
    known = _chosen(op)
    if known is None and _all_alike(op):
        known = 0
    if known is not None:
        inline_region(op, known, [])
        return True
    changed = hoist_shared(op)
    return _replace_shared_results(op) or changed


def _loop(op: ir.Operation) -> bool:
    condition, body = (region.blocks[0] for region in op.regions)
    if any(not loops.is_pure(one) for one in operations(condition)[:-1]):
        return False
    runs = read_constant(terminator(condition).operands[0], 1)
    trip = trip_count(op)
    if (runs is not None and not runs) or (trip is not None and trip[1] <= 0):
        for result, value in zip(op.results, op.operands, strict=True):
            result.replace_all_uses_with(value)
        op.erase()
        return True
    if trip is not None and trip[1] == 1 and len(body.arguments) == len(op.operands):
        inline_region(op, 1, list(op.operands))
        return True
    return False


@dataclass(frozen=True)
class MergeBranches:
    """Takes the branches that are known, and what all branches do out of them."""

    name: ClassVar[str] = "merge-branches"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "known branches and loops, work that branches share"
    stands_alone: ClassVar[bool] = True

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        changed = False
        while self._once(module):
            changed = True
        return changed

    def _once(self, module: Any) -> bool:
        changed = False
        # Innermost first, so that what is erased holds nothing still to be visited.
        found = walk(module.module.operation, (*_BRANCHES, loops.WHILE))
        for op in reversed(found):
            # A sharding or another annotation would be lost.
            if len(op.attributes):
                continue
            changed |= _loop(op) if op.name == loops.WHILE else _branch(op)
        return changed
