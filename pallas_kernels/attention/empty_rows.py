"""Queries that see no key, in a backward pass.

With a finite mask fill such a query averages all values, hidden ones included: each
value gets 1 / S of its cotangent, and no score a gradient. With a fill of -inf its
probabilities are NaN, and so is the gradient of every value that it multiplies.
Kernels do something else there. So they are given zeros for these rows, and what
the rows add is computed here. `fix_empty_rows` is the same for the forward pass.

A bias can make rows that are lost, where it hides all keys: a logsumexp of large
magnitude says nothing about the sum, as -1e9 + log(40) is -1e9 in float32. Their
gradients are made NaN, not wrong numbers, unless their cotangent is zero.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from hlo_tools.composites import AttentionSpec, rows_with_keys

# Where float32 knows the logsumexp to less than half a unit of bfloat16.
LARGEST_STATISTIC = 2.0**15


def may_be_empty(spec: AttentionSpec) -> bool:
    """Whether there may be queries that see no key."""
    return not spec.rows_never_empty and spec.mask_fill is not None


def without_empty_rows(
    spec: AttentionSpec, array: jax.Array, *sides: jax.Array
) -> jax.Array:
    """Returns `array` with zeros in the rows that see no key.

    Args:
      spec: a named site.
      array: [B,T,H,Dv].
      *sides: the side operands.
    """
    if not may_be_empty(spec):
        return array
    grouped = _grouped(spec, array)
    return jnp.where(_seen(spec, sides), grouped, 0).reshape(array.shape)


def add_empty_rows(
    spec: AttentionSpec, dv: jax.Array, dout: jax.Array, *sides: jax.Array
) -> jax.Array:
    """Adds what the rows that see no key contribute to the gradient of v.

    Args:
      spec: a named site.
      dv: [B,S,K,Dv], of the other rows.
      dout: [B,T,H,Dv], as the program gives it.
      *sides: the side operands.

    Returns:
      [B,S,K,Dv] in the dtype of `dv`.
    """
    if not may_be_empty(spec):
        return dv
    assert spec.mask_fill is not None
    seen = _seen(spec, sides)
    dtype = spec.compute_dtype
    if math.isinf(spec.mask_fill):
        empty = jnp.broadcast_to(~seen.all((1, 3)), (spec.batch, spec.kv_heads, 1))
        share = jnp.where(empty, jnp.asarray(jnp.nan, dtype), 0)  # [B,K,1]
    else:
        # As the site does: each probability is 1 / S, rounded to its dtype.
        each = jnp.asarray(1 / spec.k_len, spec.probs_dtype).astype(dtype)
        rows = jnp.where(seen, 0, _grouped(spec, dout).astype(dtype))
        share = rows.sum((1, 3)) * each  # [B,K,Dv]
    return (dv.astype(dtype) + share[:, None]).astype(dv.dtype)


def without_lost_rows(
    spec: AttentionSpec, dout: jax.Array, logsumexp: jax.Array
) -> jax.Array:
    """Returns `dout` with NaN in rows whose probabilities are lost, see above.

    Args:
      spec: the site.
      dout: [B,T,H,Dv].
      logsumexp: float32 [B,H,T], of each row.
    """
    if not spec.has_bias:
        return dout
    lost = jnp.transpose(jnp.abs(logsumexp) > LARGEST_STATISTIC, (0, 2, 1))[..., None]
    counts = (dout != 0).any(-1, keepdims=True)
    return jnp.where(lost & counts, jnp.asarray(jnp.nan, dout.dtype), dout)


def _grouped(spec: AttentionSpec, array: jax.Array) -> jax.Array:
    """Returns [B,T,H,Dv] as [B,T,K,G,Dv]."""
    return array.reshape(*array.shape[:2], spec.kv_heads, spec.group, array.shape[-1])


def _seen(spec: AttentionSpec, sides: tuple[jax.Array, ...]) -> jax.Array:
    """Returns bool [B|1,T,K|1,G|1,1]."""
    seen = rows_with_keys(spec, *sides)  # [B|1,K|1,G|1,T]
    return jnp.transpose(seen, (0, 3, 1, 2))[..., None]
