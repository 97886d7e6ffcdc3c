"""What the warpgroups of the backward kernels for Hopper GPUs have in common."""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hopper
from pallas_kernels.attention.gpu_backward_plan import KEYS_OF_WARPGROUP, Side
from pallas_kernels.attention.gpu_scores import Span, Tile


class Worker:
    """A compute warpgroup.

    Args:
      side: what it shares with the others.
      sums: "q" and "bias", those of their gradients that are added up in global
        memory.
    """

    def __init__(self, side: Side, sums):
        self.side, self.kernel, self.scratch = side, side.kernel, side.scratch
        self.sums = sums
        self.dtype = self.scratch["k_tile"].dtype
        self.shape = (KEYS_OF_WARPGROUP, self.kernel.config.block_q)

    def each_tile(self, step, group, own, span: Span, member, state):
        """Folds step(group, own, span, member, masked, tile, state) over the tiles."""
        step = functools.partial(step, group, own, span, member)
        masked, plain = functools.partial(step, True), functools.partial(step, False)
        if not self.kernel.scores.hides:
            return lax.fori_loop(span.first, span.end, plain, state)
        if self.kernel.scores.hides_by_data:
            return lax.fori_loop(span.first, span.end, masked, state)
        state = lax.fori_loop(span.first, span.full_first, masked, state)
        state = lax.fori_loop(span.full_first, span.full_end, plain, state)
        if self.kernel.problem.band[0] is None:
            return state
        return lax.fori_loop(span.full_end, span.end, masked, state)

    def probabilities(self, raw, stage, tile: Tile, masked):
        """Returns P^T, and the slope of the cap or None."""
        scores = self.kernel.scores
        x, factor, slope = scores.capped(raw)
        x, factor = scores.in_log2(x, factor, self.side.refs, tile, masked)
        return jnp.exp2(x * factor - self.column("lse_tiles", stage)), slope

    def add_product(self, acc, narrow, right) -> jax.Array:
        """Returns acc + narrow right, the first factor from registers."""
        if self.kernel.interpret:
            return acc + hopper.interpreted_product(narrow, right)
        return pl.run_state(lambda acc: plgpu.wgmma(acc, narrow, right))(
            hopper.ACC.init(acc)
        )

    def column(self, name: str, stage) -> jax.Array:
        """Loads a number a query and repeats it for all keys."""
        numbers = plgpu.load(
            self.scratch[name].at[stage], layout=hopper.COLUMNS, optimized=False
        )
        return lax.broadcast_in_dim(numbers, self.shape, [1])

    def order_reads(self) -> None:
        """Orders what threads have read before later copies to the same place.

        The hardware does; the interpreter takes threads and copies to be two worlds.
        """
        if self.kernel.interpret:
            plgpu.commit_smem()

    def add(self, value, staging, target) -> None:
        """Adds a tile in global memory, in any order with other blocks."""
        if self.kernel.interpret:  # it knows no copy that adds
            target[...] += value
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")
