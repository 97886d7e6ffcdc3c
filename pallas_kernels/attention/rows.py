"""Attention by whole rows, in the spelling that XLA's CPU compiler fuses.

XLA hands product, softmax and product to the YNN library as one fused operation,
which keeps scores in registers and caches, if nothing but arithmetic stands between
them: a `select` or a change of rank breaks it up, and the scores go to memory. So
here the masks are a `minimum` with +inf or the mask's fill, there are three dims,
and the division by the row sums comes after the value product.

That is the fastest form on a CPU (benchmarks/online_attention_cpu.py). Should the
compiler not fuse it, as happens for little work, a block of `BLOCK_BYTES` of scores
is what it costs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hlo_tools.composites import AttentionSpec, fix_empty_rows, visible_keys
from pallas_kernels.attention import tiles

# Of the scores of one block, if they are not fused away.
BLOCK_BYTES = 64 << 20
# Fewer rows are products of a matrix and a few vectors, which are not fused.
MIN_ROWS = 16
# YNN prepares k and v anew for each block, so one should have enough rows.
GOOD_ROWS = 512
# A causal mask hides half of the scores. Cutting the queries into this many groups,
# each with the keys that its last query sees, leaves 5/8 of them to compute.
CAUSAL_GROUPS = 4
CAUSAL_MIN_QUERIES = 1024


class RowBlocks(NamedTuple):
    """What one block of rows covers.

    Attributes:
      batch, kv_heads, queries: block size along B, K and T; the first two divide.
      groups: parts of T, each with its own number of keys.
    """

    batch: int
    kv_heads: int
    queries: int
    groups: int


def suits(spec: AttentionSpec) -> bool:
    """Whether a site can be computed, and is fused, in this form."""
    pairs = spec.batch * spec.kv_heads  # a batch dim of 1 is removed, see above
    rows = spec.group * spec.q_len
    return spec.named and spec.masks_are_negligible and pairs > 1 and rows >= MIN_ROWS


def choose_blocks(spec: AttentionSpec) -> RowBlocks:
    """Returns the blocks for a site that `suits`."""
    low, high = spec.band
    grouped = high is not None and low is None and spec.q_len >= CAUSAL_MIN_QUERIES
    groups = CAUSAL_GROUPS if grouped else 1
    longest = -(-spec.q_len // groups)
    scores = BLOCK_BYTES // spec.compute_dtype.itemsize
    row = spec.group * spec.k_len
    queries = min(longest, max(GOOD_ROWS // spec.group, 1))
    pairs = max(scores // (queries * row), 1)
    kv_heads = tiles.largest_divisor(spec.kv_heads, pairs)
    batch = 1
    if kv_heads == spec.kv_heads:
        batch = tiles.largest_divisor(spec.batch, pairs // kv_heads)
    most = max(scores // (batch * kv_heads * row), 1)
    if most < longest and low is not None and high is not None:
        most = min(most, queries)  # the window of fewer queries is narrower
    parts = -(-longest // most)
    return RowBlocks(batch, kv_heads, -(-longest // parts), groups)


def row_attention(
    spec: AttentionSpec,
    blocks: RowBlocks,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *sides: jax.Array,
) -> jax.Array:
    """Computes attention block by block of whole rows.

    Args:
      spec: a site that `suits`.
      blocks: as chosen.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *sides: [B|1,K|1,G|1,T|1,S|1] each.

    Returns:
      [B,T,H,Dv] in `spec.out_dtype`.
    """
    dtype = spec.compute_dtype
    q = q.reshape(spec.batch, spec.q_len, spec.kv_heads, spec.group, spec.head_dim)
    q = q.astype(dtype) * jnp.asarray(spec.scale, dtype)
    q = jnp.transpose(q, (0, 2, 3, 1, 4))  # [B,K,G,T,D]
    k = jnp.transpose(k.astype(dtype), (0, 2, 1, 3))  # [B,K,S,D]
    rows_of_v = jnp.transpose(v.astype(dtype), (0, 2, 1, 3))  # [B,K,S,Dv]
    out = lax.full_like(q, 0, spec.out_dtype, (*q.shape[:4], spec.value_dim))
    for group in range(blocks.groups):
        start = group * spec.q_len // blocks.groups
        end = (group + 1) * spec.q_len // blocks.groups
        run = functools.partial(
            _block, spec, blocks, (start, end), q, k, rows_of_v, sides
        )
        count = _count(spec, blocks, end - start)
        out = run(0, out) if count == 1 else lax.fori_loop(0, count, run, out)
    out = jnp.transpose(out, (0, 3, 1, 2, 4))  # [B,T,K,G,Dv]
    out = out.reshape(spec.batch, spec.q_len, spec.heads, spec.value_dim)
    return fix_empty_rows(spec, out, v, *sides) if spec.band != (None, None) else out


def _count(spec: AttentionSpec, blocks: RowBlocks, queries: int) -> int:
    pairs = spec.batch // blocks.batch * (spec.kv_heads // blocks.kv_heads)
    return pairs * -(-queries // blocks.queries)


def _block(
    spec: AttentionSpec,
    blocks: RowBlocks,
    group: tuple[int, int],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sides: Sequence[jax.Array],
    index,
    out: jax.Array,
) -> jax.Array:
    """Computes block number `index` of a group of queries into `out`."""
    queries = min(blocks.queries, group[1] - group[0])
    lead = (blocks.batch, blocks.kv_heads, spec.group, queries)
    b, h, t = _starts(spec, blocks, group, queries, index)
    s, keys = _key_range(spec, group, queries, t)
    pairs, rows = lead[0] * lead[1], lead[2] * lead[3]
    q_tile = tiles.slice_tile(q, (b, h, 0, t, 0), (*lead, spec.head_dim))
    k_tile = tiles.slice_tile(k, (b, h, s, 0), (*lead[:2], keys, spec.head_dim))
    v_tile = tiles.slice_tile(v, (b, h, s, 0), (*lead[:2], keys, spec.value_dim))
    x = lax.dot_general(
        q_tile.reshape(pairs, rows, spec.head_dim),
        k_tile.reshape(pairs, keys, spec.head_dim),
        (((2,), (2,)), ((0,), (0,))),
        precision=spec.precision[0].lower(),
    )  # [pairs,rows,s]
    size = (*lead, keys)
    side_tiles = tuple(tiles.side_tile(side, (b, h, 0, t, s), size) for side in sides)
    x = _modified(spec, x, size, side_tiles, t, s)
    probs = jnp.exp(x - x.max(-1, keepdims=True))
    total = probs.sum(-1, keepdims=True)
    result = lax.dot_general(
        probs,
        v_tile.reshape(pairs, keys, spec.value_dim),
        (((2,), (1,)), ((0,), (0,))),
        precision=spec.precision[1].lower(),
    )  # [pairs,rows,Dv]
    result = (result / total).astype(out.dtype).reshape(*lead, spec.value_dim)
    return tiles.update_tile(out, result, (b, h, 0, t, 0))


def _starts(spec: AttentionSpec, blocks: RowBlocks, group, queries: int, index):
    """Returns where block `index` starts along B, K and T."""
    along_t = -(-(group[1] - group[0]) // queries)
    along_h = spec.kv_heads // blocks.kv_heads
    if isinstance(index, int):  # the only block
        return 0, 0, group[0]
    index = tiles.as_int32(index)
    rest, t = lax.div(index, jnp.int32(along_t)), lax.rem(index, jnp.int32(along_t))
    # The last block may overlap the one before: the same rows, computed twice.
    t = jnp.minimum(group[0] + t * queries, group[1] - queries)
    b = lax.div(rest, jnp.int32(along_h)) * blocks.batch
    return b, lax.rem(rest, jnp.int32(along_h)) * blocks.kv_heads, t


def _key_range(spec: AttentionSpec, group, queries: int, t):
    """Returns the first key of a block, and how many keys it needs."""
    low, high = spec.band
    if high is None:
        return 0, spec.k_len
    end = min(max(group[1] + high, 1), spec.k_len)
    if low is None:
        return 0, end
    keys = max(min(queries + high - low, spec.k_len), 1)
    if keys >= end:
        return 0, end
    if isinstance(t, int):
        return min(max(t + low, 0), spec.k_len - keys), keys
    return jnp.clip(t + low, 0, spec.k_len - keys), keys


def _modified(spec: AttentionSpec, x: jax.Array, size, sides, t, s) -> jax.Array:
    """Applies softcap, bias and masks to scaled scores [pairs,rows,s]."""
    dtype = x.dtype
    if spec.softcap is not None:
        cap = jnp.asarray(spec.softcap, dtype)
        x = cap * jnp.tanh(x / cap)
    q_pos = t + lax.iota(jnp.int32, size[3])
    k_pos = s + lax.iota(jnp.int32, size[4])
    if spec.has_bias:
        x = x + _flat(spec.bias_fn(sides, q_pos, k_pos).astype(dtype), size)
    keep = visible_keys(spec, q_pos, k_pos)
    if spec.has_mask:
        mask = spec.mask_fn(sides, q_pos, k_pos)
        keep = mask if keep is None else keep & mask
    if keep is None:
        return x
    # where(keep, x, fill), as long as x is no lower than a fill that counts nothing
    fill = jnp.asarray(spec.mask_fill, dtype)
    limit = jnp.where(keep, jnp.asarray(jnp.inf, dtype), fill)
    return jnp.minimum(x, _flat(limit, size))


def _flat(array: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Returns [b|1,K|1,G|1,t|1,s|1] as [pairs|1,rows|1,s]."""
    array = tiles.rank5(array)
    shape = list(array.shape)
    for first, last in ((0, 2), (2, 4), (4, 5)):
        if last == 5 or math.prod(shape[first:last]) > 1:
            shape[first:last] = size[first:last]
    array = jnp.broadcast_to(array, shape)
    pairs, rows = math.prod(shape[:2]), math.prod(shape[2:4])
    return array.reshape(pairs, rows, size[4])


def temp_bytes(spec: AttentionSpec, blocks: RowBlocks) -> int:
    """Returns the memory beside operands and result, were nothing fused."""
    block = blocks.batch * blocks.kv_heads * blocks.queries * spec.group * spec.k_len
    keys = spec.batch * spec.k_len * spec.kv_heads * (spec.head_dim + spec.value_dim)
    queries = spec.batch * spec.q_len * spec.heads * (spec.head_dim + spec.value_dim)
    return (block + keys + queries) * spec.compute_dtype.itemsize
