"""Finds score products that a program computes again, for its backward pass.

`jax.checkpoint` around an attention saves the queries, keys and values, and computes
the scores anew from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jax.extend.mlir import ir

from hlo_tools.matching.dependents import carried_on, terminals
from hlo_tools.matching.hops import Hops
from hlo_tools.matching.index_space import Index
from hlo_tools.matching.operands import Step
from hlo_tools.matching.products import rounds_at_most
from hlo_tools.matching.reader import defining_op
from hlo_tools.matching.twins import TwinHops

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


def twins_of_site(hops: TwinHops, score, product) -> tuple[list, list]:
    """Finds what a backward pass computes once more from twins.

    Not the scores that lead to the result once more: there the program wants nothing
    of the forward pass saved, and that is a site of its own.

    Args:
      hops: compares values.
      score: result of the product of queries and keys.
      product: result of the product with the values.

    Returns:
      The twins of the score product, and those of the value product that come from
      saved scores or probabilities.
    """
    scores, results = (
        [twin for twin in _like(value) if hops.twins.are(value, twin)]
        for value in (score, product)
    )
    whole = {
        twin: {end.results[0] for end in terminals(hops, [twin]) if len(end.results)}
        for twin in scores
    }
    apart = [twin for twin in scores if not whole[twin] & set(results)]
    again = [twin for twin in results if not any(twin in w for w in whole.values())]
    hops.note_slots(hops.twins.hops.slots if apart else {})
    return apart, again


def _like(value) -> list:
    """Returns the products of a function that look like the one that makes a value."""
    own = defining_op(value).operation
    function = own
    while function.name != "func.func":
        function = function.parent.operation
    dimensions = own.attributes["dot_dimension_numbers"]
    found = []

    def visit(op):
        same = op.name == own.name and op.results[0].type == value.type
        if same and op.results[0] != value:
            if op.attributes["dot_dimension_numbers"] == dimensions:
                found.append(op.results[0])
        return ir.WalkResult.ADVANCE

    function.walk(visit)
    return found
