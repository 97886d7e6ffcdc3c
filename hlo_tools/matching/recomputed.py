"""Finds score products that a program computes again, for its backward pass.

`jax.checkpoint` around an attention saves the queries, keys and values, and computes
the scores anew from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hlo_tools.matching.dependents import carried_on
from hlo_tools.matching.hops import Hops
from hlo_tools.matching.index_space import Index
from hlo_tools.matching.operands import Step
from hlo_tools.matching.products import rounds_at_most

_MOST_VALUES = 200


def products_of(
    hops: Hops, steps: list[Step], found: Callable[[object, int, Index], None]
) -> None:
    """Calls `found` with every product that takes an operand, however rearranged.

    Args:
      hops: follows barriers and saved stacks.
      steps: the operand, and what it is a rearrangement of.
      found: takes (dot_general, operand number, index of that operand).
    """
    seen: set = set()
    pending = [(step.value, step.index) for step in steps]
    while pending and len(seen) < _MOST_VALUES:
        value, index = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        for use in value.uses:
            op = use.owner.operation
            if op.name == "stablehlo.dot_general":
                if rounds_at_most(op):
                    found(op, use.operand_number, index)
            else:
                pending.extend(_moved(hops, use, value, index))


def _moved(hops: Hops, use, value, index: Index) -> Iterator[tuple[object, Index]]:
    for result, inner in carried_on(hops, use, value, index):
        if inner is not None:
            yield result, inner
