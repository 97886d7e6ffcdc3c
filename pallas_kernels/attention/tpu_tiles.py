"""Which tiles of attention's scores the TPU kernels compute, and where operands lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


@dataclass(frozen=True)
class Form:
    """What the kernels compute, all known when they are built.

    Attributes:
      scale: factor of the scores.
      softcap: c of c * tanh(x / c), or None.
      low, high: key j is visible to query i iff low <= j - i <= high; None: no limit.
      k_len: keys before they were padded.
      block_q, block_k: size of a tile.
    """

    scale: float
    softcap: float | None
    low: int | None
    high: int | None
    k_len: int
    block_q: int
    block_k: int

    def is_visible(self, i, j) -> Any:
        """Whether some query of block i sees a key of block j."""
        checks = [True]
        if self.low is not None:
            last = j * self.block_k + self.block_k - 1
            checks.append(last - i * self.block_q >= self.low)
        if self.high is not None:
            last = i * self.block_q + self.block_q - 1
            checks.append(j * self.block_k - last <= self.high)
        return functools.reduce(jnp.logical_and, checks)

    def nearest_key_block(self, i, j, count: int) -> Any:
        """Returns j, or the nearest of the blocks that query block i sees."""
        if self.low is not None:
            j = jnp.maximum(j, _block(i * self.block_q + self.low, self.block_k))
        if self.high is not None:
            last = i * self.block_q + self.block_q - 1
            j = jnp.minimum(j, _block(last + self.high, self.block_k))
        return jnp.minimum(j, count - 1)

    def nearest_query_block(self, i, j, count: int) -> Any:
        """Returns i, or the nearest of the blocks that see key block j."""
        if self.high is not None:
            i = jnp.maximum(i, _block(j * self.block_k - self.high, self.block_q))
        if self.low is not None:
            last = j * self.block_k + self.block_k - 1
            i = jnp.minimum(i, _block(last - self.low, self.block_q))
        return jnp.minimum(i, count - 1)


def _block(position, size: int) -> Any:
    return lax.div(jnp.maximum(position, 0), jnp.int32(size))


@dataclass(frozen=True)
class Grid:
    """Where each operand's block of a grid step lies.

    Attributes:
      place: (b, h, x, y) of the grid -> (b, head, key-value head, query block, key
        block).
    """

    form: Form
    place: Any

    def queries(self, depth: int) -> pl.BlockSpec:
        def index(*step):
            b, h, _, i, _ = self.place(*step)
            return b, h, i, 0

        return pl.BlockSpec((1, 1, self.form.block_q, depth), index)

    def keys(self, depth: int) -> pl.BlockSpec:
        def index(*step):
            b, _, h, _, j = self.place(*step)
            return b, h, j, 0

        return pl.BlockSpec((1, 1, self.form.block_k, depth), index)

    def rows(self) -> pl.BlockSpec:
        """Of statistics [B,H,1,T]."""

        def index(*step):
            b, h, _, i, _ = self.place(*step)
            return b, h, 0, i

        return pl.BlockSpec((1, 1, 1, self.form.block_q), index)

    def bias(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Of [B|1,H|1,T|1,S]."""

        def index(*step):
            b, h, _, i, j = self.place(*step)
            place = (b, h, i)
            kept = (x if n > 1 else 0 for x, n in zip(place, shape, strict=False))
            return *kept, j

        queries = self.form.block_q if shape[2] > 1 else 1
        return pl.BlockSpec((1, 1, queries, self.form.block_k), index)


def by_queries(
    form: Form, q: jax.Array, k: jax.Array
) -> tuple[int, tuple[int, ...], Grid]:
    """Returns a grid that walks over the keys last.

    Args:
      form: the form.
      q: [B,H,T,D].
      k: [B,K,S,D].

    Returns:
      How many key blocks there are, the size of the grid, and its places.
    """
    group, count = q.shape[1] // k.shape[1], k.shape[2] // form.block_k

    def place(b, h, i, j):
        kv_head = lax.div(h, jnp.int32(group))
        return b, h, kv_head, i, form.nearest_key_block(i, j, count)

    grid = (*q.shape[:2], q.shape[2] // form.block_q, count)
    return count, grid, Grid(form, place)


def by_keys(
    form: Form, q: jax.Array, k: jax.Array
) -> tuple[int, tuple[int, ...], Grid]:
    """Returns a grid that walks over a group's query heads and their queries last.

    Args:
      form: the form.
      q: [B,H,T,D].
      k: [B,K,S,D].

    Returns:
      How many steps that is, the size of the grid, and its places.
    """
    group, count = q.shape[1] // k.shape[1], q.shape[2] // form.block_q

    def place(b, h, j, step):
        member, i = lax.div(step, jnp.int32(count)), lax.rem(step, jnp.int32(count))
        return b, h * group + member, h, form.nearest_query_block(i, j, count), j

    steps = group * count
    return steps, (*k.shape[:2], k.shape[2] // form.block_k, steps), Grid(form, place)
