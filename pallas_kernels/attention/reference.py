"""The reference: attention with all scores in memory, in plain JAX.

It says what an `AttentionProblem` means, and is the only backend that takes every one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from hlo_tools.targets import Target
from pallas_kernels.attention.backends import Backend
from pallas_kernels.attention.problem import AttentionProblem, Gradients, Operands

# Products of float32 are in float32, on every device.
_einsum = functools.partial(jnp.einsum, precision="highest")


def compute_dtype(problem: AttentionProblem) -> jnp.dtype:
    """Returns float64 if q, k, v are, else float32."""
    return jnp.promote_types(problem.dtype, jnp.float32)


def visible_keys(problem: AttentionProblem, operands: Operands) -> jax.Array | None:
    """Returns which keys each query sees.

    Args:
      problem: the problem.
      operands: its mask, segments and lengths are read.

    Returns:
      bool [B|1,H|1,T|1,S|1], or None if all see all.
    """
    rows = jnp.arange(problem.q_len, dtype=jnp.int32)[:, None]
    columns = jnp.arange(problem.k_len, dtype=jnp.int32)[None, :]
    low, high = problem.band
    checks = []
    if low is not None:
        checks.append((columns - rows >= low)[None, None])
    if high is not None:
        checks.append((columns - rows <= high)[None, None])
    if operands.mask is not None:
        checks.append(operands.mask)
    if operands.q_segments is not None and operands.k_segments is not None:
        same = operands.q_segments[:, :, None] == operands.k_segments[:, None, :]
        checks.append(same[:, None])
    if operands.q_lengths is not None:
        checks.append((rows < operands.q_lengths[:, None, None])[:, None])
    if operands.k_lengths is not None:
        checks.append((columns < operands.k_lengths[:, None, None])[:, None])
    return functools.reduce(jnp.logical_and, checks) if checks else None


def scores_ref(
    problem: AttentionProblem,
    operands: Operands,
    q: jax.Array,
    k: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """Returns what the softmax is applied to, -inf where a key is hidden.

    Args:
      problem: the problem.
      operands: all that is not among the next three.
      q: [B,T,H,D] in the dtype to compute in.
      k: [B,S,K,D].
      bias: `AttentionProblem.bias`, or None.

    Returns:
      [B,H,T,S].
    """
    q = q.reshape(*q.shape[:2], problem.kv_heads, problem.group, problem.head_dim)
    x = _einsum("btkgd,bskd->bkgts", q, k) * jnp.asarray(problem.scale, q.dtype)
    x = x.reshape(problem.batch, problem.heads, problem.q_len, problem.k_len)
    if problem.softcap is not None:
        x = problem.softcap * jnp.tanh(x / problem.softcap)
    if bias is not None:
        x = x + bias.astype(x.dtype)
    keep = visible_keys(problem, operands)
    return x if keep is None else jnp.where(keep, x, -jnp.inf)


def attention_ref(
    problem: AttentionProblem, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    """Computes attention in the plainest way; differentiable by JAX.

    Args:
      problem: the problem.
      operands: its arrays.

    Returns:
      out [B,T,H,Dv] and lse [B,H,T] in float32, or in float64 if q, k, v are.
    """
    dtype = compute_dtype(problem)
    q, k, v = (x.astype(dtype) for x in operands[:3])
    x = scores_ref(problem, operands, q, k, operands.bias)
    top = jax.lax.stop_gradient(x.max(-1, initial=-jnp.inf))  # [B,H,T]
    sinks = None
    if operands.sinks is not None:
        sinks = operands.sinks.astype(dtype)[None, :, None]
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    # A query that sees no key: -inf - -inf would be NaN, in the gradient as well.
    top = jnp.where(top == -jnp.inf, 0, top)
    exps = jnp.exp(x - top[..., None])
    total = exps.sum(-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    seen = total > 0
    total = jnp.where(seen, total, 1)
    probs = exps / total[..., None]
    lse = jnp.where(seen, top + jnp.log(total), -jnp.inf)
    return _values(problem, probs, v), lse


def attention_grads_ref(
    problem: AttentionProblem,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    wants_bias: bool = True,
) -> Gradients:
    """Computes the gradients of attention from the statistics of its rows.

    Args:
      problem: the problem.
      operands: its arrays.
      lse: [B,H,T], +inf in rows without a gradient.
      delta: [B,H,T], see `Backend.backward`.
      dout: [B,T,H,Dv].
      wants_bias: whether that of the bias is wanted.

    Returns:
      The gradients in float32 or float64.
    """
    dtype = compute_dtype(problem)
    q, k, v, dout = (x.astype(dtype) for x in (*operands[:3], dout))
    bias = None
    if operands.bias is not None and wants_bias:
        bias = operands.bias.astype(dtype)
    still = operands if bias is None else operands._replace(bias=None)

    def scores(q: jax.Array, k: jax.Array, bias: jax.Array | None) -> jax.Array:
        return scores_ref(problem, still, q, k, still.bias if bias is None else bias)

    x, pull = jax.vjp(scores, q, k, bias)
    probs = jnp.exp(x - lse.astype(dtype)[..., None])
    grouped = (problem.batch, problem.kv_heads, problem.group, *probs.shape[2:])
    rows = (*dout.shape[:2], problem.kv_heads, problem.group, problem.value_dim)
    rows_of_dout = dout.reshape(rows)
    dv = _einsum("bkgts,btkgd->bskd", probs.reshape(grouped), rows_of_dout)
    dprobs = _einsum("btkgd,bskd->bkgts", rows_of_dout, v).reshape(probs.shape)
    dq, dk, dbias = pull(probs * (dprobs - delta.astype(dtype)[..., None]))
    return Gradients(dq, dk, dv, dbias)


def _values(problem: AttentionProblem, probs: jax.Array, v: jax.Array) -> jax.Array:
    """Returns [B,T,H,Dv] of probabilities [B,H,T,S]."""
    grouped = (problem.batch, problem.kv_heads, problem.group, *probs.shape[2:])
    out = _einsum("bkgts,bskd->btkgd", probs.reshape(grouped), v)
    return out.reshape(*out.shape[:2], problem.heads, problem.value_dim)


def _forward(
    problem: AttentionProblem, config: Any, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    out, lse = attention_ref(problem, operands)
    return out.astype(problem.dtype), lse


def _backward(
    problem: AttentionProblem,
    config: Any,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    wants_bias: bool,
    deterministic: bool,
) -> Gradients:
    found = attention_grads_ref(problem, operands, lse, delta, dout, wants_bias)
    dq, dk, dv = (x.astype(problem.dtype) for x in found[:3])
    dbias = None if found.bias is None else found.bias.astype(problem.bias_dtype)
    return Gradients(dq, dk, dv, dbias)


def _supports(problem: AttentionProblem, target: Target) -> str | None:
    return None


def _supports_backward(
    problem: AttentionProblem, target: Target, wants_bias: bool
) -> str | None:
    return None


BACKEND = Backend(
    name="reference",
    platforms=("cpu", "gpu", "tpu"),
    supports=_supports,
    forward=_forward,
    supports_backward=_supports_backward,
    backward=_backward,
)
