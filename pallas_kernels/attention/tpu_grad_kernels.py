"""Pallas kernels for TPUs: attention that keeps row statistics, and its gradients.

Three kernels walk over tiles [block_q,block_k] of the scores and compute them anew
in the same way, `_tile`:

| kernel | grid | sums over | results |
|---|---|---|---|
| forward | B, H, query blocks, key blocks | keys | out, largest score, sum |
| dq | the same | keys | dq |
| dkv | B, K, key blocks, G x query blocks | queries | dk, dv |
| dbias | the bias's own blocks, all others | the others | dbias |

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
from pallas_kernels.attention.tpu_tiles import (
    Form,
    Grid,
    Sides,
    by_keys,
    by_queries,
    by_scores,
)

# Dims of the products: x @ y.T, and x @ y
TIMES_TRANSPOSED = (((1,), (1,)), ((), ()))
TIMES = (((1,), (0,)), ((), ()))
_PARALLEL = ("parallel",) * 3
_PARAMS = pltpu.CompilerParams(dimension_semantics=(*_PARALLEL, "arbitrary"))


def _tile(form: Form, at, q, k, sides: Sides) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scores of a tile, and the slope of the softcap.

    Args:
      form: the form.
      at: (b, i, j), batch element and numbers of query and key block.
      q: [block_q,D].
      k: [block_k,D].
      sides: references to the parts of this tile.

    Returns:
      float32 [block_q,block_k], -inf where a key is hidden; the same or None.
    """
    b, i, j = at
    x = _product(form, q, k, TIMES_TRANSPOSED) * form.scale
    slope = None
    if form.softcap is not None:
        capped = jnp.tanh(x / form.softcap)
        x, slope = form.softcap * capped, 1 - capped * capped
    if sides.bias is not None:
        x = x + sides.bias[0, 0].astype(jnp.float32)
    keys = j * form.block_k + lax.broadcasted_iota(jnp.int32, x.shape, 1)
    queries = i * form.block_q + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    checks = [] if form.k_len % form.block_k == 0 else [keys < form.k_len]
    checks += [] if form.low is None else [keys - queries >= form.low]
    checks += [] if form.high is None else [keys - queries <= form.high]
    if sides.mask is not None:
        mask = sides.mask[0, 0].astype(jnp.int32)
        checks.append(jnp.broadcast_to(mask, x.shape) != 0)
    if sides.q_segments is not None:
        own = jnp.expand_dims(sides.q_segments[0, 0, 0], -1)
        checks.append(own == sides.k_segments[0, 0])
    if sides.q_lengths is not None:
        checks.append(queries < sides.q_lengths[b])
    if sides.k_lengths is not None:
        checks.append(keys < sides.k_lengths[b])
    if checks:
        x = jnp.where(functools.reduce(jnp.logical_and, checks), x, -jnp.inf)
    return x, slope


def _is_visible(form: Form, at, sides: Sides) -> Any:
    """Whether some query of a tile may see one of its keys."""
    b, i, j = at
    checks = [form.is_visible(i, j)]
    if sides.q_lengths is not None:
        checks.append(i * form.block_q < sides.q_lengths[b])
    if sides.k_lengths is not None:
        checks.append(j * form.block_k < sides.k_lengths[b])
    return functools.reduce(jnp.logical_and, checks)


def _product(form: Form, x: jax.Array, y: jax.Array, dims) -> jax.Array:
    precision = lax.Precision.HIGHEST if form.exact else None
    return lax.dot_general(
        x, y, dims, precision=precision, preferred_element_type=jnp.float32
    )


def _forward_kernel(q, k, v, *refs, form: Form, blocks: int, names: tuple[str, ...]):
    sides, (out, largest, sums, top, count, total) = _split(refs, names)
    at = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    j = at[2]

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full_like(top, -jnp.inf)
        count[...] = jnp.zeros_like(count)
        total[...] = jnp.zeros_like(total)

    @pl.when(_is_visible(form, at, sides))
    def _():
        x, _ = _tile(form, at, q[0, 0], k[0, 0], sides)
        old = top[:, :1]
        new = jnp.maximum(old, x.max(1, keepdims=True))
        base = jnp.where(new == -jnp.inf, 0.0, new)  # nothing visible so far
        probs = jnp.exp(x - base)
        shrink = jnp.exp(old - base)
        values = v[0, 0]
        part = _product(form, probs.astype(values.dtype), values, TIMES)
        total[...] = total[...] * shrink + part
        new_count = count[:, :1] * shrink + probs.sum(1, keepdims=True)
        top[...] = jnp.broadcast_to(new, top.shape)
        count[...] = jnp.broadcast_to(new_count, count.shape)

    @pl.when(j == blocks - 1)
    def _():
        empty = top[...] == -jnp.inf
        seen = jnp.where(empty, 1.0, count[...])
        out[0, 0] = (total[...] / seen[:, :1]).astype(out.dtype)
        largest[0, 0] = jnp.where(empty, 0.0, top[...]).T[:1]
        sums[0, 0] = count[...].T[:1]


def _split(refs, names: tuple[str, ...]) -> tuple[Sides, Any]:
    """Returns the references to the sides, and the others."""
    count = len(names)
    return Sides(**dict(zip(names, refs[:count], strict=True))), refs[count:]


def _gradient_tile(form: Form, at, q, k, v, dout, rows, sides: Sides):
    """Returns, in float32 and of a tile, the probabilities and two gradients.

    They are that of the scores and that of q k^T.
    """
    x, slope = _tile(form, at, q[0, 0], k[0, 0], sides)
    largest, sums, delta = (jnp.expand_dims(row[0, 0, 0], -1) for row in rows)
    probs = jnp.exp(x - largest) / sums
    dprobs = _product(form, dout[0, 0].astype(v.dtype), v[0, 0], TIMES_TRANSPOSED)
    dx = probs * (dprobs - delta)
    return probs, dx, (dx if slope is None else dx * slope) * form.scale


def _dq_kernel(q, k, v, dout, *refs, form: Form, blocks: int, names: tuple[str, ...]):
    rows, (sides, (dq, total)) = refs[:3], _split(refs[3:], names)
    at = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    j = at[2]

    @pl.when(j == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(_is_visible(form, at, sides))
    def _():
        _, _, dx = _gradient_tile(form, at, q, k, v, dout, rows, sides)
        total[...] += _product(form, dx.astype(k.dtype), k[0, 0], TIMES)

    @pl.when(j == blocks - 1)
    def _():
        dq[0, 0] = total[...].astype(dq.dtype)


def _dkv_kernel(
    q, k, v, dout, *refs, form: Form, blocks: int, steps: int, names: tuple[str, ...]
):
    rows, (sides, results) = refs[:3], _split(refs[3:], names)
    dk, dv, total_k, total_v = results
    step = pl.program_id(3)
    at = pl.program_id(0), lax.rem(step, jnp.int32(blocks)), pl.program_id(2)

    @pl.when(step == 0)
    def _():
        total_k[...] = jnp.zeros_like(total_k)
        total_v[...] = jnp.zeros_like(total_v)

    @pl.when(_is_visible(form, at, sides))
    def _():
        probs, _, dx = _gradient_tile(form, at, q, k, v, dout, rows, sides)
        cotangent = dout[0, 0].astype(v.dtype)
        total_v[...] += _product(form, probs.T.astype(v.dtype), cotangent, TIMES)
        total_k[...] += _product(form, dx.T.astype(q.dtype), q[0, 0], TIMES)

    @pl.when(step == steps - 1)
    def _():
        dk[0, 0] = total_k[...].astype(dk.dtype)
        dv[0, 0] = total_v[...].astype(dv.dtype)


def _dbias_kernel(
    q, k, v, dout, *refs, form: Form, grid: Grid, steps: int, names: tuple[str, ...]
):
    rows, (sides, (dbias, total)) = refs[:3], _split(refs[3:], names)
    step = pl.program_id(4)
    b, _, _, i, j = grid.place(*(pl.program_id(axis) for axis in range(5)))
    at = b, i, j

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(_is_visible(form, at, sides))
    def _():
        _, dx, _ = _gradient_tile(form, at, q, k, v, dout, rows, sides)
        for axis in (0, 1):
            if total.shape[axis] == 1:
                dx = dx.sum(axis, keepdims=True)
        total[...] += dx

    @pl.when(step == steps - 1)
    def _():
        dbias[0, 0] = total[...].astype(dbias.dtype)


def forward(
    form: Form,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sides: Sides,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes attention and the statistics of its rows.

    Args:
      form: the form.
      q: [B,H,T,D], T whole blocks.
      k: [B,K,S,D], S whole blocks.
      v: [B,K,S,Dv].
      sides: what else the scores depend on; T and S whole blocks too.
      dtype: of the result.

    Returns:
      [B,H,T,Dv]; the largest score of each row and the sum of the exponentials,
      float32 [B,H,1,T]. All are 0 in rows that see no key.
    """
    count, grid, at = by_queries(form, q, k)
    specs = [at.queries(q.shape[3]), at.keys(k.shape[3]), at.keys(v.shape[3])]
    rows = jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), jnp.float32)
    statistics = pltpu.VMEM((form.block_q, LANES), jnp.float32)
    return pl.pallas_call(
        functools.partial(
            _forward_kernel, form=form, blocks=count, names=sides.names
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), dtype), rows, rows,
        ],
        grid=grid,
        in_specs=[*specs, *at.sides(sides)],
        out_specs=[at.queries(v.shape[3]), at.rows(), at.rows()],
        scratch_shapes=[
            statistics, statistics,
            pltpu.VMEM((form.block_q, v.shape[3]), jnp.float32),
        ],
        compiler_params=_PARAMS,
        name="attention_forward",
    )(q, k, v, *sides.arrays)  # fmt: skip


def query_gradient(
    form: Form, operands: list[jax.Array], sides: Sides, dtype: Any
) -> jax.Array:
    """Computes the gradient of q.

    Args:
      form: the form.
      operands: q, k, v, dout [B,H,T,Dv], the statistics and the sums over Dv of
        out * dout, float32 [B,H,1,T]. A sum of 0 is not allowed: make it 1.
      sides: as in `forward`.
      dtype: of the result.

    Returns:
      [B,H,T,D].
    """
    q, k, v = operands[:3]
    count, grid, at = by_queries(form, q, k)
    return pl.pallas_call(
        functools.partial(_dq_kernel, form=form, blocks=count, names=sides.names),
        out_shape=jax.ShapeDtypeStruct(q.shape, dtype),
        grid=grid,
        in_specs=_gradient_specs(at, q, k, v, sides),
        out_specs=at.queries(q.shape[3]),
        scratch_shapes=[pltpu.VMEM((form.block_q, q.shape[3]), jnp.float32)],
        compiler_params=_PARAMS,
        name="attention_dq",
    )(*operands, *sides.arrays)


def key_gradients(
    form: Form, operands: list[jax.Array], sides: Sides, dtypes: tuple[Any, Any]
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
            names=sides.names,
        ),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, dtype)
            for x, dtype in zip((k, v), dtypes, strict=True)
        ],
        grid=grid,
        in_specs=_gradient_specs(at, q, k, v, sides),
        out_specs=[at.keys(k.shape[3]), at.keys(v.shape[3])],
        scratch_shapes=[
            pltpu.VMEM((form.block_k, x.shape[3]), jnp.float32) for x in (k, v)
        ],
        compiler_params=_PARAMS,
        name="attention_dkv",
    )(*operands, *sides.arrays)  # fmt: skip


def bias_gradient(form: Form, operands: list[jax.Array], sides: Sides) -> jax.Array:
    """Computes the gradient of the bias; the arguments are those of `query_gradient`.

    Returns:
      [B|1,H|1,T|1,S|1] in the dtype of the bias.
    """
    q, k, v = operands[:3]
    shape = sides.bias.shape
    steps, grid, at = by_scores(form, q, k, shape)
    tile = [
        block if n > 1 else 1
        for n, block in zip(shape[2:], (form.block_q, form.block_k), strict=True)
    ]
    return pl.pallas_call(
        functools.partial(
            _dbias_kernel, form=form, grid=at, steps=steps, names=sides.names
        ),
        out_shape=jax.ShapeDtypeStruct(shape, sides.bias.dtype),
        grid=grid,
        in_specs=_gradient_specs(at, q, k, v, sides),
        out_specs=at.scores(shape),
        scratch_shapes=[pltpu.VMEM(tile, jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *_PARALLEL, "arbitrary")
        ),
        name="attention_dbias",
    )(*operands, *sides.arrays)


def _gradient_specs(at: Grid, q, k, v, sides: Sides) -> list[pl.BlockSpec]:
    specs = [at.queries(q.shape[3]), at.keys(k.shape[3]), at.keys(v.shape[3])]
    specs += [at.queries(v.shape[3]), at.rows(), at.rows(), at.rows()]
    return [*specs, *at.sides(sides)]
