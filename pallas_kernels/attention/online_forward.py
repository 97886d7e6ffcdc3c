"""Attention by online softmax in plain JAX: never more than a tile of scores.

A loop over query blocks holds a loop over key blocks, which carries each row's
running maximum, sum of exponentials and weighted sum of values (Milakov and
Gimelshein, arXiv 1805.02867; Rabe and Staats, arXiv 2112.05682). Every tile of scores
goes through the site's own score function, so any mask, bias or score modification
is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from hlo_tools.composites import AttentionSpec, fix_empty_rows
from pallas_kernels.attention import tiles
from pallas_kernels.attention.online_tiling import Blocks, KeyTile, QueryTile, Tiling


def online_attention(
    spec: AttentionSpec,
    blocks: Blocks,
    widen: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *sides: jax.Array,
) -> jax.Array:
    """Computes attention tile by tile.

    Args:
      spec: the site.
      blocks: the tile.
      widen: compute the products in `spec.compute_dtype`, see `product_dtypes`.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *sides: [B|1,K|1,G|1,T|1,S|1] each.

    Returns:
      [B,T,H,Dv] in `spec.out_dtype`.
    """
    return online_attention_stats(spec, blocks, widen, q, k, v, *sides)[0]


def online_attention_stats(
    spec: AttentionSpec,
    blocks: Blocks,
    widen: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *sides: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes attention tile by tile, and what the backward half needs.

    The logarithm of the sum would be lost beside a maximum of -1e30, so the two stay
    apart.

    Args:
      spec, blocks, widen, q, k, v, *sides: as of `online_attention`.

    Returns:
      The result [B,T,H,Dv] in `spec.out_dtype`; of each row the maximum of the
      scores and the sum of the exponentials, [B,H,T] in `spec.compute_dtype`, as far
      as key blocks were not skipped.
    """
    tiling = Tiling(spec, blocks, widen)
    q = q.reshape(spec.batch, spec.q_len, spec.kv_heads, spec.group, spec.head_dim)
    keys = jnp.transpose(k.astype(tiling.score_operand), (0, 2, 1, 3))  # [B,K,S,D]
    values = jnp.transpose(v.astype(tiling.value_operand), (0, 2, 1, 3))

    def query_block(index, carry):
        at = tiling.query_tile(index)
        results = _query_block(tiling, at, tiling.queries(at, q), keys, values, sides)
        out, *stats = carry
        place = (at.b, at.h, 0, at.t)
        stats = [
            tiles.update_tile(whole, x.reshape(at.lead), place)
            for whole, x in zip(stats, results[1:], strict=True)
        ]
        return tiling.put_rows(at, out, results[0]), *stats

    # full_like keeps what shard_map knows about q
    row_shape = (spec.batch, spec.kv_heads, spec.group, spec.q_len)
    rows = lax.full_like(q, 0, spec.compute_dtype, row_shape)
    out = lax.full_like(q, 0, spec.out_dtype, (*q.shape[:4], spec.value_dim))
    # The last query block may overlap the one before it: rows computed twice get the
    # same values twice.
    out, *stats = lax.fori_loop(0, tiling.count, query_block, (out, rows, rows))
    out = out.reshape(spec.batch, spec.q_len, spec.heads, spec.value_dim)
    if tiling.skips:  # a row all of whose keys were skipped is put right here
        out = fix_empty_rows(spec, out, v, *sides)
    top, total = (x.reshape(spec.batch, spec.heads, spec.q_len) for x in stats)
    return out, top, total


def _query_block(
    tiling: Tiling,
    at: QueryTile,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sides: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes one query block.

    Args:
      tiling: of the site.
      at: where the block stands.
      q: [pairs,rows,D], a tile.
      k: [B,K,S,D], whole.
      v: [B,K,S,Dv], whole.
      sides: whole.

    Returns:
      [pairs,rows,Dv], and maximum and sum [pairs,rows], in `spec.compute_dtype`.
    """
    dtype, lead = tiling.spec.compute_dtype, q.shape[:2]
    carry = (
        lax.full_like(q, -jnp.inf, dtype, lead),
        lax.full_like(q, 0, dtype, lead),
        lax.full_like(q, 0, dtype, (*lead, v.shape[-1])),
    )

    def key_block(key: KeyTile, carry):
        scores = tiling.product(0, q, tiling.keys(at, key, k), (2, 2))
        place = tiling.side_place(at, key)
        parts = [tiles.side_tile(side, *place) for side in sides]
        x = tiling.modified(at, key, scores.reshape(place[1]), parts)
        x = tiling.counted_once(key, x).reshape(scores.shape)
        return _online_step(tiling, x, tiling.keys(at, key, v), carry)

    top, total, acc = tiling.over_keys(at, key_block, carry)
    # 0 / 0 where every score is -inf: NaN, as softmax gives
    return acc / total[..., None], top, total


def _online_step(tiling: Tiling, x: jax.Array, v: jax.Array, carry):
    """One step of the online softmax on X [pairs,rows,s] and v [pairs,s,Dv]."""
    top, total, acc = carry
    new_top = jnp.maximum(top, x.max(-1))
    # While all scores of a row are -inf, -inf - -inf would make it NaN.
    safe_top = jnp.where(new_top == -jnp.inf, 0, new_top)
    probs = jnp.exp(x - safe_top[..., None])
    decay = jnp.exp(top - safe_top)
    weighted = tiling.product(1, probs.astype(tiling.value_operand), v, (2, 1))
    total = total * decay + probs.sum(-1)
    return new_top, total, acc * decay[..., None] + weighted
