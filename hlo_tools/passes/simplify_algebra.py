"""simplify-algebra: identities that hold for every value of every type."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jax.extend.mlir import ir

from hlo_tools import loops
from hlo_tools.passes import (
    canonicalize_masks,
    collapse_shapes,
    fold_converts,
    simplify_arithmetic,
    simplify_dynamic,
    simplify_placement,
)
from hlo_tools.passes.constant_values import CONSTANT, dtype_of, make_constant
from hlo_tools.rewriting import (
    PatternTable,
    Rewriter,
    is_plain,
    rewrite,
    shape_of,
    walk,
)


def pattern_table(partitions: int, loose: bool) -> PatternTable:
    """Returns the patterns for a program.

    Args:
      partitions: over how many devices the program is split; reshapes are left alone
        where it is more than one.
      loose: whether x + 0.0 is x.
    """
    tables: list[PatternTable] = [
        simplify_arithmetic.PATTERNS,
        simplify_placement.PATTERNS,
        simplify_dynamic.PATTERNS,
        canonicalize_masks.PATTERNS,
        fold_converts.PATTERNS,
    ]
    if loose:
        tables.append(simplify_arithmetic.LOOSE_PATTERNS)
    if partitions == 1:
        tables += [collapse_shapes.PATTERNS, simplify_placement.RESHAPING_PATTERNS]
    joined = defaultdict(list)
    for table in tables:
        for name, patterns in table.items():
            joined[name].extend(patterns)
    return dict(joined)


def replace_empty(root: ir.Operation) -> bool:
    """Replaces results without elements by constants; returns whether any was.

    An operation with effects stays, and so does one whose attributes (a sharding)
    would be lost.
    """
    changed = False
    for op in walk(root):
        if op.name == CONSTANT or not len(op.results) or not loops.is_pure(op):
            continue
        for result in op.results:
            shape = shape_of(result)
            if shape is None or 0 not in shape or not any(True for _ in result.uses):
                continue
            dtype = dtype_of(result.type.element_type)
            if dtype is None or not (len(op.regions) or is_plain(op)):
                continue
            empty = make_constant(Rewriter(op), np.zeros(shape, dtype), result.type)
            result.replace_all_uses_with(empty)
            changed = True
    return changed


@dataclass(frozen=True)
class SimplifyAlgebra:
    """Drops what does nothing, merges what can be one operation.

    x + 0, x * 1, x - x of integers, chains of transposes, reshapes, broadcasts,
    slices, concatenations and conversions, selects and comparisons that are decided,
    indices that are constant, sizes that are static, arrays without elements.
    """

    name: ClassVar[str] = "simplify-algebra"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "identities, chains of shape operations, constant indices"
    stands_alone: ClassVar[bool] = True

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        table = pattern_table(module.partitions, context.allows("reassociating"))
        root = module.module.operation
        changed = replace_empty(root)
        return rewrite(root, table) > 0 or changed
