"""How "online" attention cuts a site into tiles, and the scores of one tile.

Both halves, forward and backward, run over the same tiles and have to see the same
scores: what one leaves about a row holds for the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hlo_tools.composites import AttentionSpec, modified_scores
from hlo_tools.targets import Target
from pallas_kernels.attention import tiles

# Measured by benchmarks/online_attention_cpu.py --sweep; see its results file.
CPU_ROWS = 256  # of a tile: queries times the heads that share a key
CPU_KEYS = 512
CPU_BAND_KEYS = 256  # with a causal mask or window: less of a tile is hidden
CPU_TILE = 1 << 19  # scores, 2 MiB of float32: the second-level caches of two cores
# The backward half has several tiles in hand at once, and needs whole rows: in one
# tile, or in several that it keeps, which takes a fifth to a half more time but leaves
# out what a causal mask or window hides (benchmarks/online_attention_grad_cpu.py).
# A small site is one tile in both halves: without loops XLA finds what they share.
CPU_GRAD_SITE = 1 << 20
CPU_GRAD_TILE = 1 << 18
CPU_GRAD_KEPT = 1 << 20
CPU_GRAD_ROWS = 64  # at least, for whole rows in one tile
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
    return Blocks(*_pairs(spec, CPU_TILE // (rows * keys)), queries, keys)


def choose_grad_blocks(spec: AttentionSpec, target: Target) -> tuple[Blocks, Blocks]:
    """Returns the tiles of both halves, as `choose_blocks` does."""
    forward = choose_blocks(spec, target)
    if target.platform != "cpu":
        return forward, forward
    if spec.score_count <= CPU_GRAD_SITE:
        site = Blocks(spec.batch, spec.kv_heads, spec.q_len, spec.k_len)
        return site, site
    rows = spec.group * min(spec.q_len, max(CPU_GRAD_ROWS // spec.group, 1))
    banded = spec.band != (None, None)
    whole = CPU_BAND_KEYS if banded else CPU_GRAD_TILE // rows
    keys, scores = spec.k_len, CPU_GRAD_TILE
    if keys > whole:
        keys = _even_block(keys, CPU_BAND_KEYS if banded else CPU_KEYS)
        scores = CPU_GRAD_KEPT
    most = min(max(scores // spec.k_len, 16), CPU_ROWS)
    queries = _even_block(spec.q_len, max(most // spec.group, 1))
    rows = queries * spec.group
    pairs = _pairs(spec, scores // (rows * spec.k_len))
    return forward, Blocks(*pairs, queries, keys)


def _pairs(spec: AttentionSpec, limit: int) -> tuple[int, int]:
    """Returns block sizes along B and K that divide theirs, of `limit` pairs at most.

    Several batch elements only if all heads are in one block.
    """
    kv_heads = tiles.largest_divisor(spec.kv_heads, limit)
    if kv_heads < spec.kv_heads:
        return 1, kv_heads
    return tiles.largest_divisor(spec.batch, limit // kv_heads), kv_heads


def _even_block(length: int, limit: int) -> int:
    """Returns the block that splits `length` into equal parts, up to rounding."""
    if length <= limit:
        return length
    parts = -(-length // limit)
    if length % limit == 0:
        return limit
    return min(-(-length // parts // 16) * 16, limit)


def product_dtypes(spec: AttentionSpec, widen: bool) -> tuple[jnp.dtype, jnp.dtype]:
    """Returns the operand dtypes of the score and the value product.

    The probabilities are rounded to a narrow dtype only where the site rounds them.

    Args:
      spec: the site.
      widen: compute the products in `spec.compute_dtype`, not in the operands' own
        dtypes. Exact, and faster where narrow products are not in hardware.
    """
    if widen:
        return spec.compute_dtype, spec.compute_dtype
    score = jnp.promote_types(spec.q_dtype, spec.k_dtype)
    return score, jnp.promote_types(spec.probs_dtype, spec.v_dtype)


class QueryTile(NamedTuple):
    """Where a query block stands.

    Attributes:
      b, h, t: its starts along B, K and T.
      fresh: the first of its queries that no block before it had: the last block
        starts early enough to be whole.
      lead: (b, K, G, t), its size; "pairs" is b * K, "rows" is G * t.
    """

    b: jax.Array
    h: jax.Array
    t: jax.Array
    fresh: jax.Array
    lead: tuple[int, int, int, int]


class KeyTile(NamedTuple):
    """Where a key block stands.

    Attributes:
      s: its start along S.
      fresh: the first of its keys that no block before it had.
      number: of the block.
      edge: whether it has to be masked, see `Tiling`.
    """

    s: jax.Array
    fresh: jax.Array
    number: jax.Array
    edge: bool


class Tiling:
    """The tiles of one site.

    Key blocks come in two kinds: inner ones, every key of which every query sees as
    far as causal and window limits go, and edge ones. Masking costs a pass over the
    tile, so inner ones go without.

    Attributes:
      count: of query blocks, over all of B, K and T.
      skips: whether key blocks that no query of the block sees are left out.
      score_operand, value_operand: dtypes of the operands of the products.
      q_scale: what the queries of a tile are already multiplied with.
    """

    def __init__(self, spec: AttentionSpec, blocks: Blocks, widen: bool):
        self.spec, self.blocks = spec, blocks
        self.score_operand, self.value_operand = product_dtypes(spec, widen)
        self.q_scale = spec.scale if widen and spec.named else 1.0
        self._along_h = np.int32(spec.kv_heads // blocks.kv_heads)
        self._along_t = np.int32(-(-spec.q_len // blocks.queries))
        self.key_block_count = -(-spec.k_len // blocks.keys)
        self.count = spec.batch // blocks.batch * int(self._along_h * self._along_t)
        self.ragged_queries = spec.q_len % blocks.queries != 0
        self.ragged_keys = spec.k_len % blocks.keys != 0
        self.skips = spec.band != (None, None) and spec.masks_are_negligible
        self._edge_spec = self._inner_spec = spec
        if spec.named:
            scale = 1.0 if self.q_scale != 1.0 else spec.scale
            self._edge_spec = dataclasses.replace(spec, score_mod=None, scale=scale)
            self._inner_spec = dataclasses.replace(
                self._edge_spec, causal=False, window=None
            )

    @property
    def one_key_block(self) -> bool:
        """Whether a tile has whole rows."""
        return self.key_block_count == 1

    def query_tile(self, index) -> QueryTile:
        """Returns query block number `index`."""
        index, blocks = tiles.as_int32(index), self.blocks
        rest, t = lax.div(index, self._along_t), lax.rem(index, self._along_t)
        fresh = t * blocks.queries
        t = jnp.minimum(fresh, self.spec.q_len - blocks.queries)
        b = lax.div(rest, self._along_h) * blocks.batch
        h = lax.rem(rest, self._along_h) * blocks.kv_heads
        lead = (blocks.batch, blocks.kv_heads, self.spec.group, blocks.queries)
        return QueryTile(b, h, t, fresh, lead)

    def queries(self, at: QueryTile, q: jax.Array) -> jax.Array:
        """Cuts a query block out of q [B,T,K,G,D], scaled, as [pairs,rows,D]."""
        tile = self.rows(at, q).astype(self.score_operand)
        if self.q_scale != 1.0:
            tile = tile * jnp.asarray(self.q_scale, self.score_operand)
        return tile

    def rows(self, at: QueryTile, array: jax.Array) -> jax.Array:
        """Cuts a query block out of [B,T,K,G,D], as [pairs,rows,D]."""
        b, h, group, t = at.lead
        size = (b, t, h, group, array.shape[-1])
        tile = tiles.slice_tile(array, (at.b, at.t, at.h, 0, 0), size)
        tile = jnp.transpose(tile, (0, 2, 3, 1, 4))  # [b,K,G,t,D]
        return tile.reshape(b * h, group * t, array.shape[-1])

    def put_rows(self, at: QueryTile, array: jax.Array, rows: jax.Array) -> jax.Array:
        """Puts [pairs,rows,D] in its place in [B,T,K,G,D], rounded to its dtype."""
        tile = rows.reshape(*at.lead, rows.shape[-1])
        tile = jnp.transpose(tile, (0, 3, 1, 2, 4)).astype(array.dtype)
        return tiles.update_tile(array, tile, (at.b, at.t, at.h, 0, 0))

    def keys(self, at: QueryTile, key: KeyTile, array: jax.Array) -> jax.Array:
        """Cuts a key block out of [B,K,S,D], as [pairs,s,D]."""
        size = (*at.lead[:2], self.blocks.keys, array.shape[-1])
        tile = tiles.slice_tile(array, (at.b, at.h, key.s, 0), size)
        return tile.reshape(-1, *size[2:])

    def over_keys(self, at: QueryTile, step: Callable, carry):
        """Runs step(key tile, carry) over the key blocks of a query block."""
        first, middle, end = self._key_blocks(at.t)
        for start, stop, edge in ((first, middle, False), (middle, end, True)):
            if isinstance(start, int) and isinstance(stop, int) and start == stop:
                continue
            if self.one_key_block:  # a loop would keep XLA from fusing over its bounds
                carry = step(self._key_tile(0, edge), carry)
                continue

            def body(index, carry, edge=edge):
                return step(self._key_tile(index, edge), carry)

            carry = lax.fori_loop(start, stop, body, carry)
        return carry

    def _key_tile(self, index, edge: bool) -> KeyTile:
        number = tiles.as_int32(index)
        fresh = s = number * self.blocks.keys
        if edge and self.ragged_keys:  # the last block starts early enough to be whole
            s = jnp.minimum(fresh, self.spec.k_len - self.blocks.keys)
        return KeyTile(s, fresh, number, edge)

    def _key_blocks(self, t: jax.Array):
        """Returns (first, middle, end): inner blocks from first, edge from middle."""
        low, high = self.spec.band
        whole = self.key_block_count - self.ragged_keys
        if self.one_key_block:
            return 0, whole if low is high is None else 0, 1
        if low is None and high is None:
            return 0, whole, self.key_block_count
        if not self.skips:
            return 0, 0, self.key_block_count
        size = np.int32(self.blocks.keys)
        first, middle, end = 0, 0, self.key_block_count
        if high is not None:
            seen = jnp.maximum(t + (self.blocks.queries + high), 0)
            end = jnp.minimum(lax.div(seen + (size - 1), size), self.key_block_count)
            seen_by_all = jnp.maximum(t + (1 + high), 0)
            middle = jnp.minimum(lax.div(seen_by_all, size), whole)
        if low is not None:
            first = middle = lax.div(jnp.maximum(t + low, 0), size)
        return first, middle, end

    def product(self, which: int, left: jax.Array, right: jax.Array, contract):
        """Multiplies [pairs,_,_] by [pairs,_,_] in `spec.compute_dtype`.

        Args:
          which: 0 for the precision of the score product, 1 for the value product.
          left: in the operand dtype.
          right: the same.
          contract: a dim of each.
        """
        return lax.dot_general(
            left,
            right,
            (((contract[0],), (contract[1],)), ((0,), (0,))),
            precision=self.spec.precision[which].lower(),
            preferred_element_type=self.spec.compute_dtype,
        )

    def side_place(self, at: QueryTile, key: KeyTile):
        """Returns start and size of a tile along B, K, G, T, S."""
        return (at.b, at.h, 0, at.t, key.s), (*at.lead, self.blocks.keys)

    def modified(
        self,
        at: QueryTile,
        key: KeyTile,
        scores: jax.Array,
        side_tiles: Sequence[jax.Array],
    ) -> jax.Array:
        """Returns X of a tile from its score product [b,K,G,t,s]."""
        q_pos = at.t + lax.iota(jnp.int32, at.lead[3])
        spec = self._edge_spec if key.edge else self._inner_spec
        k_pos = self._k_pos(key)
        return modified_scores(spec, scores, tuple(side_tiles), q_pos, k_pos)

    def counted_once(self, key: KeyTile, x: jax.Array) -> jax.Array:
        """Returns X [...,s] with -inf for keys that the block before had too."""
        if not (key.edge and self.ragged_keys):
            return x
        return jnp.where(self._k_pos(key) >= key.fresh, x, -jnp.inf)

    def _k_pos(self, key: KeyTile) -> jax.Array:
        return key.s + lax.iota(jnp.int32, self.blocks.keys)
