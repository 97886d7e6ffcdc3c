"""In which order the blocks of the Hopper kernels take their tiles.

With a causal mask tiles are of all lengths, and a long one that starts last keeps all
other multiprocessors waiting. So the longest come first, over as many heads as have
their operands in the cache together; then the next heads.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

# Of the 50 MB of L2 that an H100 and an H200 have: what is read again and again, not
# what passes through.
CACHED_BYTES = 32 << 20


def heads_together(heads: int, head_bytes: int) -> int:
    """Returns how many heads' tiles are taken in turn; about equally many each time.

    Args:
      heads: all of them, of all batch elements.
      head_bytes: what the tiles of one head read again and again.
    """
    times = max(1, round(heads * head_bytes / CACHED_BYTES))
    return -(-heads // min(times, heads))


def place(number: Any, tiles: int, heads: int, together: int) -> tuple[Any, Any]:
    """Returns (head, tile) of a piece of work, the first tiles of some heads first.

    Args:
      number: int32, below heads * tiles.
      tiles: of a head.
      heads: how many.
      together: of them, see `heads_together`; 1 for all tiles of a head in a row.
    """
    if together == 1:
        return lax.div(number, tiles), lax.rem(number, tiles)
    first = lax.div(number, together * tiles) * together
    inside = lax.rem(number, together * tiles)
    count: Any = together
    if heads % together:
        count = jnp.minimum(together, heads - first)
    return first + lax.rem(inside, count), lax.div(inside, count)
