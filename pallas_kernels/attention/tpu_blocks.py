"""Sizes that the TPU kernels want: whole blocks, and lanes of 128."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LANES = 128
MOST_PADDING = 1.25


def padded_length(length: int, choices: tuple[int, ...]) -> tuple[int, int]:
    """Returns the padded length and its block: large, if that pads by little.

    Args:
      length: of T or S.
      choices: block sizes, largest first.
    """
    least = -(-length // LANES) * LANES
    for block in choices:
        padded = -(-length // block) * block
        if padded <= MOST_PADDING * least:
            return padded, block
    return least, LANES


def pad(array: jax.Array, sizes: dict[int, int], value: Any = 0) -> jax.Array:
    """Pads dims to the given sizes, at their ends."""
    widths = [(0, 0)] * array.ndim
    for axis, size in sizes.items():
        widths[axis] = (0, size - array.shape[axis])
    if not any(after for _, after in widths):
        return array
    return jnp.pad(array, widths, constant_values=value)
