"""Attention by online softmax in plain JAX: never more than a tile of scores.

A loop over query blocks holds a loop over key blocks, which carries each row's
running maximum, sum of exponentials and weighted sum of values (Milakov and
Gimelshein, arXiv 1805.02867; Rabe and Staats, arXiv 2112.05682). Every tile of scores
goes through the site's own score function, so any mask, bias or score modification
is exact.

On a CPU this is faster than the scores in memory, since a tile stays in the cache
and blocks that a causal mask or window hides are skipped. Elsewhere it saves memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hlo_tools.composites import (
    AttentionSpec,
    Implementation,
    fix_empty_rows,
    modified_scores,
)
from hlo_tools.targets import Target
from pallas_kernels.attention import cost, rows, tiles

# Measured by benchmarks/online_attention_cpu.py --sweep; see its results file.
CPU_ROWS = 256  # of a tile: queries times the heads that share a key
CPU_KEYS = 512
CPU_BAND_KEYS = 256  # with a causal mask or window: less of a tile is hidden
CPU_TILE = 1 << 19  # scores, 2 MiB of float32: the second-level caches of two cores
# Elsewhere a tile goes through main memory, and only its size matters.
ACCELERATOR_QUERIES = 1024
ACCELERATOR_KEYS = 1024


class Blocks(NamedTuple):
    """What one tile of scores covers.

    Attributes:
      batch, kv_heads, queries, keys: block size along B, K, T and S. The first two
        divide theirs.
    """

    batch: int
    kv_heads: int
    queries: int
    keys: int


def choose_blocks(spec: AttentionSpec, target: Target) -> Blocks:
    """Returns the tile for a site: analytic, nothing is timed.

    Args:
      spec: the site.
      target: CPU tiles fit its caches, others are limited in size only.
    """
    if target.platform != "cpu":
        queries = min(spec.q_len, ACCELERATOR_QUERIES)
        keys = min(spec.k_len, ACCELERATOR_KEYS)
        return Blocks(spec.batch, spec.kv_heads, queries, keys)
    banded = spec.band != (None, None)
    queries = _even_block(spec.q_len, max(CPU_ROWS // spec.group, 16))
    rows = queries * spec.group
    longest = CPU_BAND_KEYS if banded else CPU_KEYS
    # Few rows, as in decoding: longer key blocks, for as many scores in a tile.
    keys = _even_block(spec.k_len, longest * max(CPU_ROWS // rows, 1))
    pairs = max(CPU_TILE // (rows * keys), 1)
    kv_heads = tiles.largest_divisor(spec.kv_heads, pairs)
    batch = 1
    if kv_heads == spec.kv_heads:
        batch = tiles.largest_divisor(spec.batch, pairs // kv_heads)
    return Blocks(batch, kv_heads, queries, keys)


def _even_block(length: int, limit: int) -> int:
    """Returns the block that splits `length` into equal parts, up to rounding."""
    if length <= limit:
        return length
    parts = -(-length // limit)
    if length % limit == 0:
        return limit
    return min(-(-length // parts // 16) * 16, limit)


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
      widen: compute the products in `spec.compute_dtype`, not in the operands' own
        dtypes. Exact, and faster where narrow products are not in hardware.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *sides: [B|1,K|1,G|1,T|1,S|1] each.

    Returns:
      [B,T,H,Dv] in `spec.out_dtype`.
    """
    score_operand, value_operand = _product_dtypes(spec, widen)
    q = q.reshape(spec.batch, spec.q_len, spec.kv_heads, spec.group, spec.head_dim)
    k = jnp.transpose(k.astype(score_operand), (0, 2, 1, 3))  # [B,K,S,D]
    values = jnp.transpose(v.astype(value_operand), (0, 2, 1, 3))  # [B,K,S,Dv]
    q_scale = spec.scale if widen and spec.named else 1.0
    run = _QueryBlock(spec, blocks, value_operand, q_scale != 1.0)
    starts = _Grid(spec, blocks)

    def query_block(index, out):
        at = b, h, t = starts(index)
        size = (blocks.batch, blocks.queries, blocks.kv_heads, *q.shape[3:])
        tile = tiles.slice_tile(q, (b, t, h, 0, 0), size).astype(score_operand)
        if q_scale != 1.0:
            tile = tile * jnp.asarray(q_scale, score_operand)
        tile = jnp.transpose(tile, (0, 2, 3, 1, 4))  # [b,K,G,t,D]
        result = run(tile, k, values, sides, at)  # [b,K,G,t,Dv]
        result = jnp.transpose(result, (0, 3, 1, 2, 4)).astype(out.dtype)
        return tiles.update_tile(out, result, (b, t, h, 0, 0))

    # full_like keeps what shard_map knows about q
    out = lax.full_like(q, 0, spec.out_dtype, (*q.shape[:4], spec.value_dim))
    out = lax.fori_loop(0, starts.count, query_block, out)
    out = out.reshape(spec.batch, spec.q_len, spec.heads, spec.value_dim)
    # A row all of whose keys were skipped is put right here.
    return fix_empty_rows(spec, out, v, *sides) if run.skips else out


def _product_dtypes(spec: AttentionSpec, widen: bool) -> tuple[jnp.dtype, jnp.dtype]:
    """Returns the operand dtypes of the score and the value product.

    The probabilities are rounded to a narrow dtype only where the site rounds them.
    """
    if widen:
        return spec.compute_dtype, spec.compute_dtype
    score = jnp.promote_types(spec.q_dtype, spec.k_dtype)
    return score, jnp.promote_types(spec.probs_dtype, spec.v_dtype)


class _Grid:
    """Maps the counter of the outer loop to (batch, head, query) starts."""

    def __init__(self, spec: AttentionSpec, blocks: Blocks):
        heads = spec.kv_heads // blocks.kv_heads
        queries = -(-spec.q_len // blocks.queries)
        self.count = spec.batch // blocks.batch * heads * queries
        self.heads, self.queries = np.int32(heads), np.int32(queries)
        self.blocks = blocks
        self.last = spec.q_len - blocks.queries

    def __call__(self, index) -> tuple[jax.Array, jax.Array, jax.Array]:
        index = tiles.as_int32(index)
        rest, t = lax.div(index, self.queries), lax.rem(index, self.queries)
        # The last query block may overlap the one before it: rows computed twice
        # get the same values twice.
        t = jnp.minimum(t * self.blocks.queries, self.last)
        b = lax.div(rest, self.heads) * self.blocks.batch
        return b, lax.rem(rest, self.heads) * self.blocks.kv_heads, t


class _QueryBlock:
    """Runs over the key blocks of one query block.

    Key blocks come in two kinds: inner ones, every key of which every query sees as
    far as causal and window limits go, and edge ones. Masking costs a pass over the
    tile, so inner ones go without.

    Attributes:
      skips: whether key blocks that no query of the block sees are left out.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        blocks: Blocks,
        value_operand: jnp.dtype,
        scaled: bool,
    ):
        self.spec, self.blocks, self.value_operand = spec, blocks, value_operand
        self.count = -(-spec.k_len // blocks.keys)
        self.ragged = spec.k_len % blocks.keys != 0
        self.skips = spec.band != (None, None) and spec.masks_are_negligible
        self.edge_spec = self.inner_spec = spec
        if spec.named:
            self.edge_spec = dataclasses.replace(
                spec, score_mod=None, scale=1.0 if scaled else spec.scale
            )
            self.inner_spec = dataclasses.replace(
                self.edge_spec, causal=False, window=None
            )

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sides: Sequence[jax.Array],
        at: tuple[jax.Array, jax.Array, jax.Array],
    ) -> jax.Array:
        """Computes one query block.

        Args:
          q: [b,K,G,t,D], a tile.
          k: [B,K,S,D], whole.
          v: [B,K,S,Dv], whole.
          sides: whole.
          at: where the tile starts along B, K and T.

        Returns:
          [b,K,G,t,Dv] in `spec.compute_dtype`.
        """
        dtype = self.spec.compute_dtype
        lead = q.shape[:4]
        pairs, rows = lead[0] * lead[1], lead[2] * lead[3]
        flat = q.reshape(pairs, rows, q.shape[-1])
        carry = (
            lax.full_like(flat, -jnp.inf, dtype, (pairs, rows)),
            lax.full_like(flat, 0, dtype, (pairs, rows)),
            lax.full_like(flat, 0, dtype, (pairs, rows, self.spec.value_dim)),
        )
        first, middle, end = self._key_blocks(at[2])
        for start, stop, edge in ((first, middle, False), (middle, end, True)):
            if isinstance(start, int) and isinstance(stop, int) and start == stop:
                continue
            step = functools.partial(self._key_block, edge, flat, k, v, sides, at, lead)
            carry = lax.fori_loop(start, stop, step, carry)
        _, total, acc = carry
        # 0 / 0 where every score is -inf: NaN, as softmax gives
        return (acc / total[..., None]).reshape(*lead, -1)

    def _key_blocks(self, t: jax.Array):
        """Returns (first, middle, end): inner blocks from first, edge from middle."""
        low, high = self.spec.band
        whole = self.count - self.ragged
        if low is None and high is None:
            return 0, whole, self.count
        if not self.skips:
            return 0, 0, self.count
        size = np.int32(self.blocks.keys)
        first, middle, end = 0, 0, self.count
        if high is not None:
            seen = jnp.maximum(t + (self.blocks.queries + high), 0)
            end = jnp.minimum(lax.div(seen + (size - 1), size), self.count)
            seen_by_all = jnp.maximum(t + (1 + high), 0)
            middle = jnp.minimum(lax.div(seen_by_all, size), whole)
        if low is not None:
            first = middle = lax.div(jnp.maximum(t + low, 0), size)
        return first, middle, end

    def _key_block(self, edge, q, k, v, sides, at, lead, index, carry):
        """One step of the online softmax, on q [pairs,rows,D]."""
        spec, keys, dtype = self.spec, self.blocks.keys, self.spec.compute_dtype
        (b, h, t), (pairs, n, depth) = at, q.shape
        top, total, acc = carry
        start = s = tiles.as_int32(index) * keys
        ragged = edge and self.ragged
        if ragged:  # The last block starts early enough to be whole ...
            s = jnp.minimum(start, spec.k_len - keys)
        q_pos = t + lax.iota(jnp.int32, lead[3])
        k_pos = s + lax.iota(jnp.int32, keys)
        k_tile = tiles.slice_tile(k, (b, h, s, 0), (*lead[:2], keys, depth))
        v_tile = tiles.slice_tile(v, (b, h, s, 0), (*lead[:2], keys, spec.value_dim))
        scores = lax.dot_general(
            q,
            k_tile.reshape(pairs, keys, depth),
            (((2,), (2,)), ((0,), (0,))),
            precision=spec.precision[0].lower(),
            preferred_element_type=dtype,
        )  # [pairs,rows,s]
        place, size = (b, h, 0, t, s), (*lead, keys)
        parts = tuple(tiles.side_tile(side, place, size) for side in sides)
        x = modified_scores(
            self.edge_spec if edge else self.inner_spec,
            scores.reshape(*lead, keys),
            parts,
            q_pos,
            k_pos,
        )
        if ragged:  # ... and the keys that it shares with the one before count once.
            x = jnp.where(k_pos >= start, x, -jnp.inf)
        x = x.reshape(pairs, n, keys)
        new_top = jnp.maximum(top, x.max(-1))
        # While all scores of a row are -inf, -inf - -inf would make it NaN.
        safe_top = jnp.where(new_top == -jnp.inf, 0, new_top)
        probs = jnp.exp(x - safe_top[..., None])
        decay = jnp.exp(top - safe_top)
        weighted = lax.dot_general(
            probs.astype(self.value_operand),
            v_tile.reshape(pairs, keys, spec.value_dim),
            (((2,), (1,)), ((0,), (0,))),
            precision=spec.precision[1].lower(),
            preferred_element_type=dtype,
        )  # [pairs,rows,Dv]
        total = total * decay + probs.sum(-1)
        return new_top, total, acc * decay[..., None] + weighted


def _supports(spec: AttentionSpec, target: Target) -> str | None:
    if math.prod((spec.score_count, spec.head_dim, spec.value_dim)) == 0:
        return "an operand is empty"
    return None


def _by_rows(spec: AttentionSpec, target: Target) -> bool:
    return target.platform == "cpu" and rows.suits(spec)


def _config(spec: AttentionSpec, target: Target) -> dict[str, Any]:
    if _by_rows(spec, target):
        return {"form": "rows", **rows.choose_blocks(spec)._asdict()}
    return {"form": "tiles", **choose_blocks(spec, target)._asdict()}


def _temp_bytes(spec: AttentionSpec, target: Target) -> int:
    """Transposed (on a CPU also widened) k and v, and about three tiles."""
    if _by_rows(spec, target):
        return rows.temp_bytes(spec, rows.choose_blocks(spec))
    tile = math.prod(choose_blocks(spec, target)) * spec.group
    operand = _product_dtypes(spec, target.platform == "cpu")[0].itemsize
    keys = spec.batch * spec.k_len * spec.kv_heads * (spec.head_dim + spec.value_dim)
    return keys * operand + 3 * tile * spec.compute_dtype.itemsize


def _seconds(spec: AttentionSpec, target: Target) -> float:
    if _by_rows(spec, target):
        return cost.rows_seconds(spec, target, *rows.choose_blocks(spec))
    return cost.online_seconds(spec, target, *choose_blocks(spec, target))


def _build(spec: AttentionSpec, target: Target) -> Callable:
    if _by_rows(spec, target):
        return functools.partial(rows.row_attention, spec, rows.choose_blocks(spec))
    blocks = choose_blocks(spec, target)
    return functools.partial(online_attention, spec, blocks, target.platform == "cpu")


IMPLEMENTATION = Implementation(
    name="online",
    platforms=("cpu", "gpu", "tpu"),
    supports=_supports,
    seconds=_seconds,
    temp_bytes=_temp_bytes,
    config=_config,
    build=_build,
)
