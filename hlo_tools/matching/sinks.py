"""Explains a softmax over scores and columns of its own: attention with a sink."""

from __future__ import annotations

from jax.extend.mlir import ir

from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.reader import ELEMENTWISE, SHAPE_OPS, defining_op

_SLICE = "stablehlo.slice"
_CONCATENATE = "stablehlo.concatenate"
_PRODUCT = "stablehlo.dot_general"
_MOST_VALUES = 64


def sliced_product(exponential) -> tuple[ir.Operation, NoMatchError] | None:
    """Finds the value product of a softmax that has more columns than keys.

    Args:
      exponential: an operation.

    Returns:
      The product and what is wrong with it; None if the exponential is of no scores
      put together with other columns, or no slice of it goes into a product.
    """
    source = _joined_scores(exponential.operands[0])
    if source is None:
        return None
    seen: set = set()
    pending = [(exponential.results[0], None)]
    while pending and len(seen) < _MOST_VALUES:
        value, cut = pending.pop(0)
        if value in seen:
            continue
        seen.add(value)
        for use in value.uses:
            op = use.owner.operation
            if op.name == _PRODUCT and cut is not None:
                return op, _explained(cut)
            if op.name == _SLICE and cut is None:
                pending.append((op.results[0], op.results[0]))
            elif op.name in ELEMENTWISE | SHAPE_OPS:
                pending.append((op.results[0], cut))
    return None


def _joined_scores(value):
    """Returns the concatenation of a product with more that a value comes from."""
    joined = _behind(value, _CONCATENATE)
    if joined is None:
        return None
    products = [_behind(operand, _PRODUCT) for operand in joined.operands]
    return joined if any(op is not None for op in products) else None


def _behind(value, name: str) -> ir.Operation | None:
    seen: set = set()
    pending = [value]
    while pending and len(seen) < _MOST_VALUES:
        value = pending.pop(0)
        op = defining_op(value)
        if op is None or value in seen:
            continue
        seen.add(value)
        if op.operation.name == name:
            return op.operation
        if op.operation.name in ELEMENTWISE | SHAPE_OPS:
            pending.extend(op.operands)
    return None


def _explained(cut) -> NoMatchError:
    return NoMatchError(
        "the softmax runs over more columns than there are keys (a sink)",
        near=True,
        value=cut,
        got="a slice of the softmax of scores put together with other columns",
        expected="a softmax of the scores of the keys alone",
        edit="append a key and a value of zeros, and add the sink to its scores",
    )
