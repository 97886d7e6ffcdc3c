"""What attention kernels on Hopper GPUs do to a tile of scores.

The scores come from the tensor cores as float32 in registers. Band, lengths, segments,
masks, bias and softcap are applied there; which tiles need none of it is known before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hopper
from pallas_kernels.attention.problem import AttentionProblem, Operands

LOG2_E = math.log2(math.e)


class Span(NamedTuple):
    """Tiles of keys that some queries see.

    Attributes:
      first, end: tiles of which any query sees a key.
      full_first, full_end: those of them of which each of one warpgroup's queries sees
        every key.
      own_first, own_end: those of which any of these queries sees a key.
    """

    first: Any
    end: Any
    full_first: Any
    full_end: Any
    own_first: Any
    own_end: Any


class Tile(NamedTuple):
    """Where a tile of scores is.

    Attributes:
      batch, head: of the queries.
      query, key: position of the first of each.
    """

    batch: Any
    head: Any
    query: Any
    key: Any


@dataclass(frozen=True)
class Scores:
    """The scores of one problem.

    Attributes:
      problem: the problem.
      block_q: what the arrays are padded to along queries.
      block_kv: along keys, and the keys of a tile.
      transposed: tiles of scores are [keys, queries].
    """

    problem: AttentionProblem
    block_q: int
    block_kv: int
    transposed: bool = False

    def arrays(self, operands: Operands) -> list[jax.Array]:
        """Returns what a kernel reads beside q, k and v."""
        blocks = {2: self.block_q, 3: self.block_kv}
        found = {}
        if self.problem.bias is not None:
            found["bias"] = self._turned(_padded(operands.bias, blocks))
        if self.problem.mask is not None:
            mask = operands.mask.astype(jnp.int8)
            found["mask"] = self._turned(_padded(mask, blocks))
        if self.problem.segments:
            found["q_segments"] = _padded(operands.q_segments, {1: self.block_q})
            found["k_segments"] = _padded(operands.k_segments, {1: self.block_kv})
        if self.problem.k_lengths:
            found["k_lengths"] = operands.k_lengths
        return list(found.values())

    def _turned(self, array: jax.Array) -> jax.Array:
        return array.swapaxes(2, 3) if self.transposed else array

    def named(self, refs) -> dict[str, Any]:
        """Returns the references of `arrays` by name."""
        problem = self.problem
        present = {
            "bias": problem.bias is not None,
            "mask": problem.mask is not None,
            "q_segments": problem.segments,
            "k_segments": problem.segments,
            "k_lengths": problem.k_lengths,
        }
        return dict(zip((n for n, here in present.items() if here), refs, strict=True))

    @property
    def hides(self) -> bool:
        """Whether any key may be hidden from any query."""
        return (
            self.hides_by_data
            or self.problem.band != (None, None)
            or self.problem.k_lengths
            or self.problem.k_len % self.block_kv != 0
        )

    @property
    def hides_by_data(self) -> bool:
        """Whether that depends on more than positions."""
        return self.problem.mask is not None or self.problem.segments

    def span(self, refs: dict, batch, query, count: int, own, own_count: int) -> Span:
        """Returns the tiles that `count` queries from `query` on need.

        Args:
          refs: of `named`.
          batch: of the queries.
          query, count: queries whose tiles are visited.
          own, own_count: those of one warpgroup, for the tiles without masks.
        """
        size = self.block_kv
        low, high = self.problem.band
        keys = self._keys(refs, batch)
        first, end, full_first, full_end = 0, keys, 0, keys
        own_first, own_end = 0, keys
        if low is not None:
            first = lax.div(jnp.maximum(query + low, 0), size)
            own_first = lax.div(jnp.maximum(own + low, 0), size)
            full_first = _cdiv(jnp.maximum(own + own_count - 1 + low, 0), size)
        if high is not None:
            end = jnp.clip(query + count + high, 0, keys)
            own_end = jnp.clip(own + own_count + high, 0, keys)
            full_end = jnp.clip(own + high + 1, 0, keys)
        end, own_end = _cdiv(end, size), _cdiv(own_end, size)
        full_end = lax.div(jnp.int32(full_end), size)
        first = jnp.minimum(first, end)
        own_first = jnp.clip(own_first, first, end)
        own_end = jnp.clip(own_end, own_first, end)
        if self.hides_by_data:
            return Span(first, end, own_end, own_end, own_first, own_end)
        full_first = jnp.clip(full_first, own_first, own_end)
        full_end = jnp.clip(full_end, full_first, own_end)
        return Span(first, end, full_first, full_end, own_first, own_end)

    def span_of_queries(self, refs: dict, batch, key, own, own_count: int) -> Span:
        """Returns the tiles of queries that see a tile of keys.

        Args:
          refs: of `named`.
          batch: of the keys.
          key: the first of `block_kv` keys.
          own, own_count: keys of one warpgroup, for the tiles without masks.
        """
        size, queries = self.block_q, self.problem.q_len
        low, high = self.problem.band
        first, end, full_first, full_end = 0, queries, 0, queries
        if high is not None:
            first = jnp.maximum(key - high, 0)
            full_first = jnp.maximum(own + own_count - 1 - high, 0)
        if low is not None:
            end = jnp.clip(key + self.block_kv - low, 0, queries)
            full_end = jnp.clip(own - low + 1, 0, queries)
        keys = self._keys(refs, batch)
        end = jnp.where(key < keys, end, 0)
        first, end = lax.div(jnp.int32(first), size), _cdiv(end, size)
        first = jnp.minimum(first, end)
        if self.hides_by_data:
            return Span(first, end, end, end, first, end)
        # queries after the last one add nothing: a tile that has them can be full
        full_end = jnp.where(full_end >= queries, end, lax.div(full_end, size))
        whole = own + own_count <= keys
        full_first = jnp.clip(_cdiv(full_first, size), first, end)
        if low is None:  # one loop with masks is enough, in front
            full_first, full_end = jnp.where(whole, full_first, end), end
        full_end = jnp.clip(jnp.where(whole, full_end, full_first), full_first, end)
        return Span(first, end, full_first, full_end, first, end)

    def _keys(self, refs: dict, batch):
        """Returns how many keys there are."""
        if "k_lengths" not in refs:
            return jnp.int32(self.problem.k_len)
        return jnp.clip(_scalar(refs["k_lengths"].at[batch]), 0, self.problem.k_len)

    def capped(self, raw: jax.Array):
        """Returns (x, factor, slope): x * factor are the scaled, capped scores.

        Args:
          raw: float32, q k^T.

        Returns:
          slope: of the cap there, or None.
        """
        cap = self.problem.softcap
        if cap is None:
            return raw, self.problem.scale, None
        level = tanh(raw * (self.problem.scale / cap))
        return level, cap, 1.0 - level * level

    def in_log2(self, x: jax.Array, factor: float, refs: dict, tile: Tile, masked):
        """Returns (y, factor): y * factor are the scores in units of log(2).

        Args:
          x, factor: of `capped`; [queries, keys], or [keys, queries] if transposed.
          refs: of `named`.
          tile: where they are.
          masked: whether any key may be hidden from a query; hidden ones get -inf.
        """
        problem = self.problem
        if problem.bias is not None:
            bias = self._load(refs["bias"], problem.bias, tile, x.shape)
            x, factor = x * factor + bias.astype(jnp.float32), 1.0
        if factor <= 0:  # the maximum is to be that of the scores
            x, factor = x * factor, 1.0
        if masked:
            for visible in self._visible(refs, tile, x.shape):
                x = jnp.where(visible, x, -jnp.inf)
        return x, factor * LOG2_E

    def _visible(self, refs: dict, tile: Tile, shape: tuple[int, ...]):
        """Yields bool [rows, keys]: where a key is visible."""
        problem = self.problem
        low, high = problem.band
        of_query, of_key = (1, 0) if self.transposed else (0, 1)
        distance = hopper.iota(shape, of_key) - hopper.iota(shape, of_query)
        if low is not None:
            yield distance >= low + tile.query - tile.key
        if high is not None:
            yield distance <= high + tile.query - tile.key
        if problem.k_lengths or problem.k_len % self.block_kv:
            keys = self._keys(refs, tile.batch)
            yield hopper.iota(shape, of_key) < keys - tile.key
        if problem.segments:
            queries = refs["q_segments"].at[
                tile.batch, pl.ds(tile.query, shape[of_query])
            ]
            keys = refs["k_segments"].at[tile.batch, pl.ds(tile.key, shape[of_key])]
            yield _along(queries, of_query, shape) == _along(keys, of_key, shape)
        if problem.mask is not None:
            yield self._load(refs["mask"], problem.mask, tile, shape) != 0

    def _load(self, ref, full: tuple[int, ...], tile: Tile, shape: tuple[int, ...]):
        """Loads the part of a bias or mask that belongs to a tile."""
        starts, whole = (tile.query, tile.key), full[2:]
        if self.transposed:
            starts, whole = starts[::-1], whole[::-1]
        part = ref.at[
            0 if full[0] == 1 else tile.batch,
            0 if full[1] == 1 else tile.head,
            0 if whole[0] == 1 else pl.ds(starts[0], shape[0]),
            0 if whole[1] == 1 else pl.ds(starts[1], shape[1]),
        ]
        if whole == (1, 1):
            return jnp.broadcast_to(_scalar(part), shape)
        if 1 in whole:
            return _along(part, whole.index(1) ^ 1, shape)
        return _load(part, hopper.WGMMA)


def _along(ref, dim: int, shape: tuple[int, ...]) -> jax.Array:
    """Loads a vector and repeats it, to [m,n]."""
    layout = hopper.COLUMNS if dim else hopper.ROWS
    return lax.broadcast_in_dim(_load(ref, layout), shape, [dim])


def tanh(x: jax.Array) -> jax.Array:
    """Returns tanh(x); the GPU's own is right to 11 bits only."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2_E)))


def _scalar(ref) -> jax.Array:
    return ref[...]


def _load(ref, layout) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _cdiv(x, size: int):
    return lax.div(jnp.int32(x + size - 1), jnp.int32(size))


def _padded(array: Any, blocks: dict[int, int]) -> jax.Array:
    """Pads dimensions that are not 1 to multiples."""
    for dim, block in blocks.items():
        if array.shape[dim] != 1:
            array = hopper.padded(array, dim, block)
    return array
