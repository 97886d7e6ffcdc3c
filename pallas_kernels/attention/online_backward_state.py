"""What the tiles of the backward half of "online" attention hand to each other."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.attention import tiles
from pallas_kernels.attention.online_tiling import KeyTile


class Whole(NamedTuple):
    """The operands, whole.

    Attributes:
      q, out, dout: [B,T,K,G,*].
      k, v: [B,K,S,*].
      sides: as they come.
      top, total: [B,K,G,T], maximum and sum of exponentials.
      delta: [B,K,G,T], sum of P * dP, less the gradient of the logsumexp; None if it
        is to be worked out. Where it is given, so are `top` and `total`, and all
        three are taken as they are.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sides: tuple[jax.Array, ...]
    out: jax.Array
    top: jax.Array
    total: jax.Array
    dout: jax.Array
    delta: jax.Array | None = None


class Kept(NamedTuple):
    """What the first sweep keeps of a key block, or of all, along a new first dim.

    Attributes:
      exps: [pairs,rows,s], exp(X - top).
      top: [pairs,rows], the maximum so far.
      dprobs: [pairs,rows,s], dP; a scalar where it is not needed.
      scores: [pairs,rows,s]; a scalar unless the gradient of X depends on them.
    """

    exps: jax.Array
    top: jax.Array
    dprobs: jax.Array
    scores: jax.Array

    def put(self, tile: Kept, number: jax.Array) -> Kept:
        """Puts a key block's in its place."""
        pairs = zip(self, tile, strict=True)
        return Kept(*(_put(whole, part, number) for whole, part in pairs))

    def of(self, key: KeyTile) -> Kept:
        """Takes a key block's out."""
        return Kept(*(_take(whole, key.number) for whole in self))


class Rows(NamedTuple):
    """What one query block knows.

    Attributes:
      q: [pairs,rows,D], scaled.
      dout: [pairs,rows,Dv].
      top, share: [pairs,rows], maximum, and 1 over the sum of exponentials.
      delta: [pairs,rows]; None where it is not needed.
      rest: [pairs,rows], what delta lacks to be the mean of dP; None if not kept.
      kept: None if the tiles are to be computed again.
    """

    q: jax.Array
    dout: jax.Array
    top: jax.Array
    share: jax.Array
    delta: jax.Array | None
    rest: jax.Array | None = None
    kept: Kept | None = None


def _put(whole: jax.Array, tile: jax.Array, number: jax.Array) -> jax.Array:
    if not whole.ndim:
        return whole
    return tiles.update_tile(whole, tile[None], (number, *(0,) * tile.ndim))


def _take(whole: jax.Array, number: jax.Array) -> jax.Array:
    if not whole.ndim:
        return whole
    start, size = (number, *(0,) * (whole.ndim - 1)), (1, *whole.shape[1:])
    return tiles.slice_tile(whole, start, size)[0]
