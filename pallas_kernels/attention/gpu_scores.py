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
      full_first, full_end: those of them of which each query sees every key.
    """

    first: Any
    end: Any
    full_first: Any
    full_end: Any


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
    """

    problem: AttentionProblem
    block_q: int
    block_kv: int

    def arrays(self, operands: Operands) -> list[jax.Array]:
        """Returns what a kernel reads beside q, k and v."""
        blocks = {2: self.block_q, 3: self.block_kv}
        found = {}
        if self.problem.bias is not None:
            found["bias"] = _padded(operands.bias, blocks)
        if self.problem.mask is not None:
            found["mask"] = _padded(operands.mask.astype(jnp.int8), blocks)
        if self.problem.segments:
            found["q_segments"] = _padded(operands.q_segments, {1: self.block_q})
            found["k_segments"] = _padded(operands.k_segments, {1: self.block_kv})
        if self.problem.k_lengths:
            found["k_lengths"] = operands.k_lengths
        return list(found.values())

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
        keys = self.problem.k_len
        if "k_lengths" in refs:
            keys = jnp.clip(_scalar(refs["k_lengths"].at[batch]), 0, keys)
        first, end, full_first, full_end = 0, keys, 0, keys
        if low is not None:
            first = lax.div(jnp.maximum(query + low, 0), size)
            full_first = _cdiv(jnp.maximum(own + own_count - 1 + low, 0), size)
        if high is not None:
            end = jnp.clip(query + count + high, 0, keys)
            full_end = jnp.clip(own + high + 1, 0, keys)
        end, full_end = _cdiv(end, size), lax.div(jnp.int32(full_end), size)
        first = jnp.minimum(first, end)
        if self.hides_by_data:
            return Span(first, end, end, end)
        full_first = jnp.clip(full_first, first, end)
        return Span(first, end, full_first, jnp.clip(full_end, full_first, end))

    def in_log2(self, raw: jax.Array, refs: dict, tile: Tile, masked: bool):
        """Returns (x, factor): x * factor are the scores in units of log(2).

        Args:
          raw: float32 [rows, keys], q k^T.
          refs: of `named`.
          tile: where they are.
          masked: whether any key may be hidden from a query; hidden ones get -inf.
        """
        problem = self.problem
        x, factor = raw, problem.scale
        if problem.softcap is not None:
            x, factor = problem.softcap * tanh(x * (factor / problem.softcap)), 1.0
        if problem.bias is not None:
            bias = self._load(refs["bias"], problem.bias, tile, raw.shape)
            x, factor = x * factor + bias.astype(jnp.float32), 1.0
        if factor <= 0:  # the maximum is to be that of the scores
            x, factor = x * factor, 1.0
        if masked:
            for visible in self._visible(refs, tile, raw.shape):
                x = jnp.where(visible, x, -jnp.inf)
        return x, factor * LOG2_E

    def _visible(self, refs: dict, tile: Tile, shape: tuple[int, int]):
        """Yields bool [rows, keys]: where a key is visible."""
        problem = self.problem
        low, high = problem.band
        distance = hopper.iota(shape, 1) - hopper.iota(shape, 0)
        if low is not None:
            yield distance >= low + tile.query - tile.key
        if high is not None:
            yield distance <= high + tile.query - tile.key
        keys = problem.k_len
        if "k_lengths" in refs:
            keys = jnp.minimum(_scalar(refs["k_lengths"].at[tile.batch]), keys)
        if problem.k_lengths or problem.k_len % self.block_kv:
            yield hopper.iota(shape, 1) < keys - tile.key
        if problem.segments:
            rows = _load(
                refs["q_segments"].at[tile.batch, pl.ds(tile.query, shape[0])],
                hopper.ROWS,
            )
            columns = _load(
                refs["k_segments"].at[tile.batch, pl.ds(tile.key, shape[1])],
                hopper.COLUMNS,
            )
            yield lax.broadcast_in_dim(rows, shape, [0]) == lax.broadcast_in_dim(
                columns, shape, [1]
            )
        if problem.mask is not None:
            mask = self._load(refs["mask"], problem.mask, tile, shape)
            yield mask != 0

    def _load(self, ref, full: tuple[int, ...], tile: Tile, shape: tuple[int, int]):
        """Loads the part of a bias or mask that belongs to a tile, [rows, keys]."""
        batch = 0 if full[0] == 1 else tile.batch
        head = 0 if full[1] == 1 else tile.head
        rows = 0 if full[2] == 1 else pl.ds(tile.query, shape[0])
        keys = 0 if full[3] == 1 else pl.ds(tile.key, shape[1])
        part = ref.at[batch, head, rows, keys]
        if full[2] == 1 and full[3] == 1:
            return jnp.broadcast_to(_scalar(part), shape)
        if full[2] == 1:
            return lax.broadcast_in_dim(_load(part, hopper.COLUMNS), shape, [1])
        if full[3] == 1:
            return lax.broadcast_in_dim(_load(part, hopper.ROWS), shape, [0])
        return _load(part, hopper.WGMMA)


def tanh(x: jax.Array) -> jax.Array:
    """Returns tanh(x); the GPU's own is right to 11 bits only."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2_E)))


def _scalar(ref) -> jax.Array:
    return ref[...]


def _load(ref, layout) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _cdiv(x, size: int):
    return lax.div(jnp.int32(x + size - 1), jnp.int32(size))


def _padded(array: jax.Array, blocks: dict[int, int]) -> jax.Array:
    """Pads dimensions that are not 1 to multiples."""
    for dim, block in blocks.items():
        if array.shape[dim] != 1:
            array = hopper.padded(array, dim, block)
    return array
