"""The backward half of "online" attention: tiles again, the scores computed anew.

With P = softmax(X) and delta = rowsum(P * dP), where dP = dout v^T, the gradient of
the scores is dX = P * (dP - delta) (Dao et al., arXiv 2205.14135). What lies
between q k^T and X is differentiated by JAX, tile by tile, so any site is exact.

Where a softmax is saturated dX is a small difference: with P near 1 it is dP - delta.
So maximum, sum and delta of a row are taken of the very scores and dP that its
gradients are taken of, however long it is (`sweep`), and the mean of dP - delta, which
rounding leaves, is taken off as well: JAX's own gradient of a softmax makes dX of the
top key zero instead, in float64 too, once 1 - P is below epsilon. Flash attention's
delta, rowsum(dout * out), with maximum and sum from the forward half, spares a look at
every tile but leaves eps * |dP|, which may be many times the true gradient.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from hlo_tools.composites import AttentionSpec, rows_with_keys
from hlo_tools.gradients import GradSpec, Wanted
from pallas_kernels.attention.online_backward_state import Whole
from pallas_kernels.attention.online_backward_tiles import Backward
from pallas_kernels.attention.online_tiling import Blocks


def online_attention_grads(
    spec: AttentionSpec,
    grad: GradSpec,
    blocks: Blocks,
    widen: bool,
    sweep: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
) -> tuple[jax.Array, ...]:
    """Computes the gradients of attention tile by tile.

    Args:
      spec: the site.
      grad: what is wanted.
      blocks: the tile.
      widen: compute the products in `spec.compute_dtype`, see `product_dtypes`.
      sweep: look at all keys of a query block first, and keep what is found. If not,
        and if a tile does not have whole rows, the forward half's numbers are used.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *rest: the sides [B|1,K|1,G|1,T|1,S|1] each, then what the forward half gave:
        its result [B,T,H,Dv], the maxima and sums [B,H,T]; then dout [B,T,H,Dv].

    Returns:
      The gradients in the order of `grad.wanted`, in `grad.dtypes`.
    """
    sides, (out, top, total, dout) = list(rest[:-4]), rest[-4:]
    for number in grad.sides:
        sides[number] = _varying_like(sides[number], q)
    backward = Backward(spec, grad, blocks, widen, sweep)
    grouped = (spec.batch, spec.q_len, spec.kv_heads, spec.group, -1)
    row_shape = (spec.batch, spec.kv_heads, spec.group, spec.q_len)
    q, out, dout = (x.reshape(grouped) for x in (q, out, dout))
    top, total = (x.reshape(row_shape) for x in (top, total))
    of_all_values = None
    if backward.tiling.skips and not spec.rows_never_empty:
        seen = rows_with_keys(spec, *sides)  # [B|1,K|1,G|1,T]
        of_all_values = _of_empty_rows(spec, seen, dout)
        # To the tiles, which are not all of their keys, such rows do not exist.
        top, total = jnp.where(seen, top, 0), jnp.where(seen, total, 1)
        seen = jnp.transpose(seen, (0, 3, 1, 2))[..., None]
        out, dout = (jnp.where(seen, x, jnp.zeros_like(x)) for x in (out, dout))
    keys = jnp.transpose(k.astype(backward.score_operand), (0, 2, 1, 3))
    values = jnp.transpose(v.astype(backward.value_operand), (0, 2, 1, 3))
    found = backward(Whole(q, keys, values, tuple(sides), out, top, total, dout))
    if of_all_values is not None and "v" in found:
        found["v"] = found["v"] + of_all_values[..., None]
    return _results(spec, grad, found)


def online_attention_given(
    spec: AttentionSpec,
    grad: GradSpec,
    blocks: Blocks,
    widen: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
) -> tuple[jax.Array, ...]:
    """Computes the gradients tile by tile, from given statistics of the rows.

    Args:
      spec: the site; rows that see no key get no gradient.
      grad: what is wanted.
      blocks: the tile.
      widen: compute the products in `spec.compute_dtype`, see `product_dtypes`.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *rest: the sides [B|1,K|1,G|1,T|1,S|1] each; then the logsumexp, +inf in rows
        that see no key, and what is taken from dP, both [B,H,T]; then dout
        [B,T,H,Dv].

    Returns:
      The gradients in the order of `grad.wanted`, in `grad.dtypes`.
    """
    sides, (lse, delta, dout) = list(rest[:-3]), rest[-3:]
    for number in grad.sides:
        sides[number] = _varying_like(sides[number], q)
    backward = Backward(spec, grad, blocks, widen, sweep=False)
    grouped = (spec.batch, spec.q_len, spec.kv_heads, spec.group, -1)
    row_shape = (spec.batch, spec.kv_heads, spec.group, spec.q_len)
    q, dout = (x.reshape(grouped) for x in (q, dout))
    lse, delta = (x.reshape(row_shape) for x in (lse, delta))
    keys = jnp.transpose(k.astype(backward.score_operand), (0, 2, 1, 3))
    values = jnp.transpose(v.astype(backward.value_operand), (0, 2, 1, 3))
    found = backward(
        Whole(
            q, keys, values, tuple(sides),
            out=dout, top=lse, total=jnp.ones_like(lse), dout=dout, delta=delta,
        )
    )  # fmt: skip
    return _results(spec, grad, found)


def _results(
    spec: AttentionSpec, grad: GradSpec, found: dict[Wanted, jax.Array]
) -> tuple[jax.Array, ...]:
    """Returns the gradients that `Backward` found in their own shapes and dtypes."""
    results = []
    for name, dtype in zip(grad.wanted, grad.dtypes, strict=True):
        array = found[name].astype(dtype)
        if name == "q":
            array = array.reshape(spec.batch, spec.q_len, spec.heads, spec.head_dim)
        results.append(array if isinstance(name, int) or name == "q" else _back(array))
    return tuple(results)


def _back(array: jax.Array) -> jax.Array:
    return jnp.transpose(array, (0, 3, 1, 2))  # [B,S,K,*]


def _varying_like(array: jax.Array, other: jax.Array) -> jax.Array:
    """Returns `array`, told apart by device under shard_map wherever `other` is.

    Otherwise JAX would sum its gradient over the devices, in every tile.
    """
    always = lax.full_like(other, True, bool, array.shape)  # XLA drops it again
    return jnp.where(always, array, jnp.zeros_like(array))


def _of_empty_rows(spec: AttentionSpec, seen: jax.Array, dout: jax.Array) -> jax.Array:
    """Returns what the rows that see no key give to the gradient of every value.

    Each of their probabilities is 1 / S with a finite `mask_fill`, and NaN with -inf;
    none of their scores is a product of q and k.

    Args:
      spec: the site.
      seen: bool [B|1,K|1,G|1,T], as of `rows_with_keys`.
      dout: [B,T,K,G,Dv].

    Returns:
      [B,K,Dv] in `spec.compute_dtype`.
    """
    dtype = spec.compute_dtype
    if math.isinf(spec.mask_fill or 0):
        some = jnp.any(~seen, axis=(2, 3))[..., None]  # [B|1,K|1,1]
        shape = (spec.batch, spec.kv_heads, spec.value_dim)
        return jnp.broadcast_to(jnp.where(some, jnp.nan, 0).astype(dtype), shape)
    share = jnp.asarray(1 / spec.k_len, spec.probs_dtype).astype(dtype)
    seen = jnp.transpose(seen, (0, 3, 1, 2))[..., None]  # [B|1,T,K|1,G|1,1]
    return jnp.where(seen, 0, dout.astype(dtype)).sum((1, 3)) * share
