"""Cutting tiles out of attention's operands, by starts known at run time only."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def slice_tile(array: jax.Array, start: Sequence, size: Sequence[int]) -> jax.Array:
    """Returns the tile of `array` from `start`, Python ints or int32 scalars.

    Args:
      array: any rank.
      start: nonnegative; the tile must lie within the array.
      size: the whole array if it has its shape.
    """
    if tuple(size) == array.shape:
        return array
    start = [np.int32(i) if isinstance(i, int) else i for i in start]
    return lax.dynamic_slice(array, start, size, allow_negative_indices=False)


def update_tile(array: jax.Array, tile: jax.Array, start: Sequence) -> jax.Array:
    """Returns `array` with `tile` put at `start`."""
    if tile.shape == array.shape:
        return tile
    start = [np.int32(i) if isinstance(i, int) else i for i in start]
    return lax.dynamic_update_slice(array, tile, start, allow_negative_indices=False)


def add_tile(array: jax.Array, tile: jax.Array, start: Sequence) -> jax.Array:
    """Returns `array` with `tile` added from `start`; dims of size 1 start at 0."""
    pairs = zip(start, array.shape, strict=True)
    start = [i if n > 1 else 0 for i, n in pairs]
    return update_tile(array, slice_tile(array, start, tile.shape) + tile, start)


def side_tile(side: jax.Array, start: Sequence, size: Sequence[int]) -> jax.Array:
    """Cuts the tile out of a side operand, along the dims that it has.

    Args:
      side: [B|1,K|1,G|1,T|1,S|1].
      start: of the tile along B, K, G, T, S.
      size: of the tile.
    """
    kept = [n > 1 for n in side.shape]
    start = [i if keep else 0 for i, keep in zip(start, kept, strict=True)]
    size = [n if keep else 1 for n, keep in zip(size, kept, strict=True)]
    return slice_tile(side, start, size)


def rank5(array: jax.Array) -> jax.Array:
    """Returns `array` with leading dims of size 1 up to rank 5."""
    return array.reshape((1,) * (5 - array.ndim) + array.shape)


def largest_divisor(number: int, limit: int) -> int:
    """Returns the largest divisor of `number` up to `limit`, at least 1."""
    return max(d for d in range(1, min(number, max(limit, 1)) + 1) if number % d == 0)


def as_int32(index) -> jax.Array:
    """Returns a loop counter as int32; with 64-bit types on it is wider."""
    return lax.convert_element_type(index, jnp.int32)
