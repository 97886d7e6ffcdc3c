"""Pallas kernels for TPUs: attention that keeps row statistics, and its gradients.

Three kernels walk over tiles [block_q,block_k] of the scores and compute them anew
in the same way, `_tile`:

| kernel | grid | sums over | results |
|---|---|---|---|
| forward | B, H, query blocks, key blocks | keys | out, largest score, sum |
| dq | the same | keys | dq |
| dkv | B, K, key blocks, G x query blocks | queries | dk, dv |

Products are on the MXU with float32 sums; their operands have the dtype of q, k, v.
The statistics of a row are its largest score m and the sum l of exp(x - m): the
logsumexp m + log(l) would lose l beside an m of large magnitude. Tiles that no query
sees are neither fetched nor computed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.tpu_blocks import LANES
from pallas_kernels.attention.tpu_tiles import Form, Grid, by_keys, by_queries

# Dims of the products: x @ y.T, and x @ y
TIMES_TRANSPOSED = (((1,), (1,)), ((), ()))
TIMES = (((1,), (0,)), ((), ()))
_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
)


def _tile(form: Form, i, j, q, k, bias) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scores of tile (i, j), and the slope of the softcap.

    Args:
      form: the form.
      i: number of the query block.
      j: of the key block.
      q: [block_q,D].
      k: [block_k,D].
      bias: [block_q|1,block_k], or None.

    Returns:
      float32 [block_q,block_k], -inf where a key is hidden; the same or None.
    """
    x = _product(q, k, TIMES_TRANSPOSED) * form.scale
    slope = None
    if form.softcap is not None:
        capped = jnp.tanh(x / form.softcap)
        x, slope = form.softcap * capped, 1 - capped * capped
    if bias is not None:
        x = x + bias
    keys = j * form.block_k + lax.broadcasted_iota(jnp.int32, x.shape, 1)
    queries = i * form.block_q + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    checks = [] if form.k_len % form.block_k == 0 else [keys < form.k_len]
    checks += [] if form.low is None else [keys - queries >= form.low]
    checks += [] if form.high is None else [keys - queries <= form.high]
    if checks:
        x = jnp.where(functools.reduce(jnp.logical_and, checks), x, -jnp.inf)
    return x, slope


def _product(x: jax.Array, y: jax.Array, dims) -> jax.Array:
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def _forward_kernel(q, k, v, *refs, form: Form, blocks: int, has_bias: bool):
    bias, (out, largest, sums, top, count, total) = _split(refs, has_bias)
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full_like(top, -jnp.inf)
        count[...] = jnp.zeros_like(count)
        total[...] = jnp.zeros_like(total)

    @pl.when(form.is_visible(i, j))
    def _():
        x, _ = _tile(form, i, j, q[0, 0], k[0, 0], bias)
        old = top[:, :1]
        new = jnp.maximum(old, x.max(1, keepdims=True))
        base = jnp.where(new == -jnp.inf, 0.0, new)  # nothing visible so far
        probs = jnp.exp(x - base)
        shrink = jnp.exp(old - base)
        values = v[0, 0]
        part = _product(probs.astype(values.dtype), values, TIMES)
        total[...] = total[...] * shrink + part
        new_count = count[:, :1] * shrink + probs.sum(1, keepdims=True)
        top[...] = jnp.broadcast_to(new, top.shape)
        count[...] = jnp.broadcast_to(new_count, count.shape)

    @pl.when(j == blocks - 1)
    def _():
        # A row that sees nothing: its probabilities are zero in the backward pass.
        empty = top[...] == -jnp.inf
        seen = jnp.where(empty, 1.0, count[...])
        out[0, 0] = (total[...] / seen[:, :1]).astype(out.dtype)
        largest[0, 0] = jnp.where(empty, 0.0, top[...]).T[:1]
        sums[0, 0] = seen.T[:1]


def _split(refs, has_bias: bool):
    """Returns the tile of the bias, or None, and the other references."""
    return (refs[0][0, 0], refs[1:]) if has_bias else (None, refs)


def _gradient_tile(form: Form, i, j, q, k, v, dout, rows, bias):
    """Returns the probabilities of a tile and the gradient of q k^T, in float32."""
    x, slope = _tile(form, i, j, q[0, 0], k[0, 0], bias)
    largest, sums, delta = (jnp.expand_dims(row[0, 0, 0], -1) for row in rows)
    probs = jnp.exp(x - largest) / sums
    dprobs = _product(dout[0, 0].astype(v.dtype), v[0, 0], TIMES_TRANSPOSED)
    dx = probs * (dprobs - delta)
    return probs, (dx if slope is None else dx * slope) * form.scale


def _dq_kernel(q, k, v, dout, *refs, form: Form, blocks: int, has_bias: bool):
    rows, (bias, (dq, total)) = refs[:3], _split(refs[3:], has_bias)
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(form.is_visible(i, j))
    def _():
        _, dx = _gradient_tile(form, i, j, q, k, v, dout, rows, bias)
        total[...] += _product(dx.astype(k.dtype), k[0, 0], TIMES)

    @pl.when(j == blocks - 1)
    def _():
        dq[0, 0] = total[...].astype(dq.dtype)


def _dkv_kernel(
    q, k, v, dout, *refs, form: Form, blocks: int, steps: int, has_bias: bool
):
    rows, (bias, results) = refs[:3], _split(refs[3:], has_bias)
    dk, dv, total_k, total_v = results
    j, step = pl.program_id(2), pl.program_id(3)
    i = lax.rem(step, jnp.int32(blocks))

    @pl.when(step == 0)
    def _():
        total_k[...] = jnp.zeros_like(total_k)
        total_v[...] = jnp.zeros_like(total_v)

    @pl.when(form.is_visible(i, j))
    def _():
        probs, dx = _gradient_tile(form, i, j, q, k, v, dout, rows, bias)
        cotangent = dout[0, 0].astype(v.dtype)
        total_v[...] += _product(probs.T.astype(v.dtype), cotangent, TIMES)
        total_k[...] += _product(dx.T.astype(q.dtype), q[0, 0], TIMES)

    @pl.when(step == steps - 1)
    def _():
        dk[0, 0] = total_k[...].astype(dk.dtype)
        dv[0, 0] = total_v[...].astype(dv.dtype)


def forward(
    form: Form,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes attention and the statistics of its rows.

    Args:
      form: the form.
      q: [B,H,T,D], T whole blocks.
      k: [B,K,S,D], S whole blocks.
      v: [B,K,S,Dv].
      bias: float32 [B|1,H|1,T|1,S], added to the scaled scores, or None.
      dtype: of the result.

    Returns:
      [B,H,T,Dv], anything in rows that see no key; the largest score of each row
      and the sum of the exponentials, float32 [B,H,1,T].
    """
    count, grid, at = by_queries(form, q, k)
    specs = [at.queries(q.shape[3]), at.keys(k.shape[3]), at.keys(v.shape[3])]
    rows = jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), jnp.float32)
    statistics = pltpu.VMEM((form.block_q, LANES), jnp.float32)
    return pl.pallas_call(
        functools.partial(
            _forward_kernel, form=form, blocks=count, has_bias=bias is not None
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), dtype), rows, rows,
        ],
        grid=grid,
        in_specs=specs if bias is None else [*specs, at.bias(bias.shape)],
        out_specs=[at.queries(v.shape[3]), at.rows(), at.rows()],
        scratch_shapes=[
            statistics, statistics,
            pltpu.VMEM((form.block_q, v.shape[3]), jnp.float32),
        ],
        compiler_params=_PARAMS,
        name="attention_forward",
    )(q, k, v, *([] if bias is None else [bias]))  # fmt: skip


def query_gradient(form: Form, operands: list[jax.Array], bias, dtype) -> jax.Array:
    """Computes the gradient of q.

    Args:
      form: the form.
      operands: q, k, v, dout [B,H,T,Dv], the statistics and the sums over Dv of
        out * dout, float32 [B,H,1,T].
      bias: as in `forward`.
      dtype: of the result.

    Returns:
      [B,H,T,D].
    """
    q, k, v = operands[:3]
    count, grid, at = by_queries(form, q, k)
    return pl.pallas_call(
        functools.partial(
            _dq_kernel, form=form, blocks=count, has_bias=bias is not None
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, dtype),
        grid=grid,
        in_specs=_gradient_specs(at, q, k, v, bias),
        out_specs=at.queries(q.shape[3]),
        scratch_shapes=[pltpu.VMEM((form.block_q, q.shape[3]), jnp.float32)],
        compiler_params=_PARAMS,
        name="attention_dq",
    )(*operands, *([] if bias is None else [bias]))


def key_gradients(
    form: Form, operands: list[jax.Array], bias, dtypes: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of k and v; the arguments are those of `query_gradient`.

    Returns:
      [B,K,S,D] and [B,K,S,Dv].
    """
    q, k, v = operands[:3]
    steps, grid, at = by_keys(form, q, k)
    return pl.pallas_call(
        functools.partial(
            _dkv_kernel, form=form, blocks=q.shape[2] // form.block_q, steps=steps,
            has_bias=bias is not None,
        ),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, dtype)
            for x, dtype in zip((k, v), dtypes, strict=True)
        ],
        grid=grid,
        in_specs=_gradient_specs(at, q, k, v, bias),
        out_specs=[at.keys(k.shape[3]), at.keys(v.shape[3])],
        scratch_shapes=[
            pltpu.VMEM((form.block_k, x.shape[3]), jnp.float32) for x in (k, v)
        ],
        compiler_params=_PARAMS,
        name="attention_dkv",
    )(*operands, *([] if bias is None else [bias]))  # fmt: skip


def _gradient_specs(at: Grid, q, k, v, bias) -> list[pl.BlockSpec]:
    specs = [at.queries(q.shape[3]), at.keys(k.shape[3]), at.keys(v.shape[3])]
    specs += [at.queries(v.shape[3]), at.rows(), at.rows(), at.rows()]
    return specs if bias is None else [*specs, at.bias(bias.shape)]
