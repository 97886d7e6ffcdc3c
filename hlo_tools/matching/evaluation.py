"""Turns scalar expressions into JAX functions on tiles of scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from hlo_tools.matching.expressions import NUMPY_TYPES, Expr, is_float

_COMPARE = {
    "EQ": jnp.equal, "NE": jnp.not_equal, "LT": jnp.less, "LE": jnp.less_equal,
    "GT": jnp.greater, "GE": jnp.greater_equal,
}  # fmt: skip

# StableHLO operation -> function of arrays that broadcast against each other.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "abs": jnp.abs, "add": jnp.add, "atan2": jnp.arctan2, "cbrt": jnp.cbrt,
    "ceil": jnp.ceil, "cosine": jnp.cos, "exponential": jnp.exp,
    "exponential_minus_one": jnp.expm1, "floor": jnp.floor, "log": jnp.log,
    "is_finite": jnp.isfinite,
    "log_plus_one": jnp.log1p, "logistic": lax.logistic, "maximum": jnp.maximum,
    "minimum": jnp.minimum, "multiply": jnp.multiply, "negate": jnp.negative,
    "not": jnp.invert, "or": jnp.bitwise_or, "and": jnp.bitwise_and,
    "xor": jnp.bitwise_xor, "power": jnp.power, "rsqrt": lax.rsqrt,
    "round_nearest_afz": lax.round,
    "round_nearest_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "sign": jnp.sign, "sine": jnp.sin, "sqrt": jnp.sqrt, "subtract": jnp.subtract,
    "tan": jnp.tan, "tanh": jnp.tanh, "select": jnp.where,
    "clamp": lambda low, x, high: jnp.minimum(jnp.maximum(x, low), high),
    **{f"compare.{name}": function for name, function in _COMPARE.items()},
}  # fmt: skip


def _divide(left, right, dtype: str):
    if is_float(dtype):
        return left / right
    left, right = jnp.broadcast_arrays(left, right)
    return lax.div(left, right)


def _remainder(left, right):
    left, right = jnp.broadcast_arrays(left, right)
    return lax.rem(left, right)


def evaluate(expr: Expr, inputs: Mapping[int, Any], positions: Callable[[Expr], Any]):
    """Evaluates an expression on arrays, operation by operation.

    Every value is computed in the program's own type: its roundings decide, for
    instance, whether a mask value absorbs a score, or where two float positions
    are equal.

    Args:
      expr: what to evaluate.
      inputs: arrays for nodes, by ``id`` of the node (the scores, the sides).
      positions: gives the array of an iota node.

    Returns:
      An array of the expression's type, broadcastable to the tile.
    """
    memo: dict[int, Any] = {}

    def cast(array, dtype: str):
        return jnp.asarray(array).astype(NUMPY_TYPES[dtype])

    def visit(node: Expr):
        if id(node) not in memo:
            memo[id(node)] = compute(node)
        return memo[id(node)]

    def compute(node: Expr):
        if id(node) in inputs:
            return cast(inputs[id(node)], node.dtype)
        if node.kind == "const":
            return cast(node.data, node.dtype)
        if node.kind == "iota":
            return cast(positions(node), node.dtype)
        args = [visit(arg) for arg in node.args]
        if node.name == "convert":
            return cast(_truncated(args[0], node), node.dtype)
        if node.name == "divide":
            return _divide(args[0], args[1], node.dtype)
        if node.name == "remainder":
            return _remainder(*args)
        return OPERATIONS[node.name](*args)

    return visit(expr)


def _truncated(array, node: Expr):
    """StableHLO converts floats to integers toward zero, as lax does."""
    if is_float(node.args[0].dtype) and not is_float(node.dtype):
        return jnp.trunc(array) if node.dtype != "i1" else array
    return array
