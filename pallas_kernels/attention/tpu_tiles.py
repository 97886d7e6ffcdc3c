"""Which tiles of attention's scores the TPU kernels compute, and where operands lie."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@dataclass(frozen=True)
class Form:
    """What the kernels compute, all known when they are built.

    Attributes:
      scale: factor of the scores.
      softcap: c of c * tanh(x / c), or None.
      low, high: key j is visible to query i iff low <= j - i <= high; None: no limit.
      k_len: keys before they were padded.
      block_q, block_k: size of a tile.
      exact: products of float32 in float32; the MXU's default rounds the operands.
    """

    scale: float
    softcap: float | None
    low: int | None
    high: int | None
    k_len: int
    block_q: int
    block_k: int
    exact: bool = False

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


class Sides(NamedTuple):
    """What the scores depend on beside q and k: arrays, or a kernel's references.

    Attributes:
      bias: [B|1,H|1,T|1,S|1], added to the scaled scores.
      mask: int8 of the same form, 0 where a key is hidden.
      q_segments: int32 [B,1,1,T].
      k_segments: int32 [B,1,1,S].
      q_lengths, k_lengths: int32 [B].
    """

    bias: Any = None
    mask: Any = None
    q_segments: Any = None
    k_segments: Any = None
    q_lengths: Any = None
    k_lengths: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """Those that there are."""
        return tuple(name for name, x in self._asdict().items() if x is not None)

    @property
    def arrays(self) -> list[Any]:
        """Those that there are, in the order of `names`."""
        return [x for x in self if x is not None]


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

    def scores(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Of [B|1,H|1,T|1,S|1]."""

        def index(*step):
            b, h, _, i, j = self.place(*step)
            return tuple(
                x if n > 1 else 0 for x, n in zip((b, h, i, j), shape, strict=True)
            )

        queries = self.form.block_q if shape[2] > 1 else 1
        keys = self.form.block_k if shape[3] > 1 else 1
        return pl.BlockSpec((1, 1, queries, keys), index)

    def _of_batch(self, along: int, size: int) -> pl.BlockSpec:
        """Of [B,1,1,T|S]."""

        def index(*step):
            place = self.place(*step)
            return place[0], 0, 0, place[along]

        return pl.BlockSpec((1, 1, 1, size), index)

    def sides(self, sides: Sides) -> list[pl.BlockSpec]:
        """Of the side operands that there are."""
        whole = pl.BlockSpec(memory_space=pltpu.SMEM)
        specs = {
            "q_segments": self._of_batch(3, self.form.block_q),
            "k_segments": self._of_batch(4, self.form.block_k),
            "q_lengths": whole,
            "k_lengths": whole,
        }
        return [
            self.scores(x.shape) if name in ("bias", "mask") else specs[name]
            for name, x in zip(sides.names, sides.arrays, strict=True)
        ]


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


def by_scores(
    form: Form, q: jax.Array, k: jax.Array, shape: tuple[int, ...]
) -> tuple[int, tuple[int, ...], Grid]:
    """Returns a grid that walks last over what is summed to [B|1,H|1,T|1,S|1].

    Args:
      form: the form.
      q: [B,H,T,D].
      k: [B,K,S,D].
      shape: of the sum.

    Returns:
      How many steps that is, the size of the grid, and its places.
    """
    group = q.shape[1] // k.shape[1]
    whole = (
        *q.shape[:2], q.shape[2] // form.block_q, k.shape[2] // form.block_k,
    )  # fmt: skip
    kept = [n > 1 for n in shape]

    def place(*step):
        rest, found = step[4], []
        for keep, count, x in zip(
            reversed(kept), reversed(whole), reversed(step[:4]), strict=True
        ):
            found.append(x if keep else lax.rem(rest, jnp.int32(count)))
            rest = rest if keep else lax.div(rest, jnp.int32(count))
        j, i, h, b = found
        return b, h, lax.div(h, jnp.int32(group)), i, j

    steps = math.prod(n for n, keep in zip(whole, kept, strict=True) if not keep)
    outer = (n if keep else 1 for n, keep in zip(whole, kept, strict=True))
    return steps, (*outer, steps), Grid(form, place)
