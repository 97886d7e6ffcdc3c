"""How benchmarks/attention.py tells right from wrong.

What is checked are the very programs that are measured, at their full size: the query
heads of the first and of the last key-value head, for all batch elements, against
float32 products. Errors are taken by blocks of rows, because gradients of single rows
cancel out and because rows that see few keys are many times larger than the others:
the norm of a block's error over the norm of the block. One element of usual size that
is off by itself is 1% of a block of 64 x 128, above the limits of bfloat16.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from attention_rows import Arrays, Row

BLOCK = 64  # rows
# The largest relative error of rounding a number once.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# In such errors. Rounding once is 0.4 of it in the mean. Seen with XLA's own code on a
# CPU at S = 2048: out 0.6 (probabilities and result), gradients 0.4 to 0.7.
LIMITS = {"out": 1.5, "dq": 2.0, "dk": 2.0, "dv": 2.0, "dbias": 2.0}
HIGHEST = jax.lax.Precision.HIGHEST


def limit(row: Row, name: str) -> float:
    """Returns the largest relative error of a block that counts as right."""
    return LIMITS[name] * ROUNDING[row.dtype]


def errors(
    row: Row, arrays: Arrays, found: Arrays, kv_head: jax.Array
) -> dict[str, jax.Array]:
    """Returns the largest relative error of each result, for one key-value head.

    Args:
      row: the case.
      arrays: what it was computed from.
      found: results: "out", and "dq", "dk", "dv", "dbias" if there.
      kv_head: an index, which can be traced.
    """
    ours = _of_head(row, arrays, kv_head)
    exact = expected(row, ours)
    named = _of_head(row, found, kv_head)
    return {
        name: _block_error(_by_rows(name, x), _by_rows(name, exact[name]))
        for name, x in named.items()
    }


def _by_rows(name: str, x: jax.Array) -> jax.Array:
    """Returns a result with its rows in dim 1, those of a bias [1,G,T,S] too."""
    return x.swapaxes(1, 2) if name == "dbias" else x


def _of_head(row: Row, arrays: Arrays, kv_head: jax.Array) -> Arrays:
    """Returns the part of all arrays that belongs to one key-value head."""
    group = row.heads // row.kv_heads

    def part(name: str, x: jax.Array) -> jax.Array:
        if name in ("mask", "segments"):
            return x
        size = 1 if name in ("k", "v", "dk", "dv") else group
        dim = 1 if name in ("bias", "dbias") else 2
        return jax.lax.dynamic_slice_in_dim(x, kv_head * size, size, dim)

    return {name: part(name, x) for name, x in arrays.items()}


def expected(row: Row, arrays: Arrays) -> Arrays:
    """Returns out and all gradients of one key-value head, by float32 products.

    Args:
      row: the case.
      arrays: q and dout [B,T,G,D], k and v [B,S,1,D], bias [1,G,T,S], and the rest.

    Returns:
      out, dq [B,T,G,D], dk, dv [B,S,1,D] and dbias [1,G,T,S], if there is a bias.
    """
    wide = {
        name: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in arrays.items()
    }
    keep = _visible(row, wide)
    names = [name for name in ("q", "k", "v", "bias") if name in wide]

    def compute(*parts: jax.Array) -> jax.Array:
        given = dict(zip(names, parts, strict=True))
        q, k, v = given["q"], given["k"], given["v"]
        scores = jnp.einsum("btgd,bsd->bgts", q, k[:, :, 0], precision=HIGHEST)
        scores = scores * row.depth**-0.5
        if row.softcap is not None:
            scores = row.softcap * jnp.tanh(scores / row.softcap)
        scores = scores + given.get("bias", 0.0)
        probs = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bgts,bsd->btgd", probs, v[:, :, 0], precision=HIGHEST)

    out, vjp = jax.vjp(compute, *(wide[name] for name in names))
    gradients = vjp(wide["dout"])
    named = {f"d{name}": x for name, x in zip(names, gradients, strict=True)}
    return {"out": out, **named}


def _visible(row: Row, arrays: Arrays) -> jax.Array:
    """Returns which keys are visible, bool and broadcastable to [B,1,T,S]."""
    behind = jnp.arange(row.length)[:, None] - jnp.arange(row.length)  # [T,S]
    keep = (behind >= 0) if row.causal else jnp.ones_like(behind, bool)
    if row.window is not None:
        keep &= behind <= row.window
    keep = keep[None, None]
    if "mask" in arrays:
        keep = keep & arrays["mask"]
    if "segments" in arrays:
        ids = arrays["segments"]
        keep = keep & (ids[:, None, :, None] == ids[:, None, None, :])
    return keep


def _block_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """Returns the largest relative error of a block; NaN if anything is NaN.

    Args:
      got, want: [batch, rows, heads, columns]; a block is of one batch and head.
    """
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    wrong, size = _block_norms(got - want), _block_norms(want)
    return jnp.max(jnp.where(wrong == 0, 0.0, wrong / size))


def _block_norms(x: jax.Array) -> jax.Array:
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:])
    return jnp.sqrt(jnp.sum(x * x, axis=(2, 4)))
