"""The warpgroups of the backward kernel for Hopper GPUs that multiply."""

from __future__ import annotations

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hopper
from pallas_kernels.attention.gpu_backward_plan import KEYS_OF_WARPGROUP, Kernel, Side
from pallas_kernels.attention.gpu_backward_worker import Worker
from pallas_kernels.attention.gpu_scores import Span, Tile


def flat_scratch(kernel: Kernel) -> dict:
    """Returns the shared memory that is not as in the kernel for large head dims."""
    problem, config = kernel.problem, kernel.config
    groups, dtype = config.compute_warpgroups, jnp.dtype(problem.dtype)
    shape = (groups, KEYS_OF_WARPGROUP, config.block_q)
    part = config.dq_part(problem.head_dim)
    bias = {}
    if kernel.wants_bias:
        bias["dbias_tile"] = hopper.tiled(shape, jnp.float32)
    if not kernel.has_dq:
        return bias
    return bias | {
        "ds_tiles": hopper.tiled((2, *shape), dtype),
        "dq_tile": hopper.tiled((groups, *part), jnp.float32),
        "ds_ready": plgpu.Barrier(num_arrivals=groups, num_barriers=2),
    }


class Compute(Worker):
    """A compute warpgroup.

    Args:
      side: what it shares with the others.
      dk, dv: results in global memory.
      sums: "q" and "bias", those of their gradients that are added up in global
        memory.
    """

    def __init__(self, side: Side, dk, dv, sums):
        super().__init__(side, sums)
        self.dk, self.dv = dk, dv

    def run(self, group) -> None:
        """Computes the gradients of the tile of keys."""
        side, problem = self.side, self.kernel.problem
        for stage in range(self.kernel.config.stages):
            hopper.arrive(side.free + stage, side.everyone)
        own = side.key + group * KEYS_OF_WARPGROUP
        span = side.span(own)
        # of no tile, which adds nothing to the first
        before = (side.head(0), self.kernel.tile_inside(span.first))
        if self.kernel.has_dq:
            self.write_ds(group, 1, hopper.zeros(self.shape).astype(self.dtype))
            plgpu.barrier_arrive(self.scratch["ds_ready"].at[1])
        plgpu.barrier_wait(self.scratch["kv_ready"])
        before, dk, dv = side.each_head(
            functools.partial(self.each_tile, self.step, group, own, span),
            (
                before,
                hopper.zeros((KEYS_OF_WARPGROUP, problem.head_dim)),
                hopper.zeros((KEYS_OF_WARPGROUP, problem.value_dim)),
            ),
        )
        if self.kernel.has_dq:
            slot = lax.rem(problem.group * (span.end - span.first) + 1, 2)
            self.add_queries(group, before, self.last_queries(group, slot))
        plgpu.wait_smem_to_gmem(0)
        hopper.sync(side.together, side.compute_threads)
        self.write(group, own, dk * problem.scale, dv)

    def step(self, group, own, span: Span, member, masked, index, state):
        """Adds what one tile of queries contributes."""
        side, config = self.side, self.kernel.config
        number = member * (span.end - span.first) + index - span.first
        stage, slot = lax.rem(number, config.stages), lax.rem(number, 2)
        index = side.turned(index, span)
        tile = Tile(side.batch, side.head(member), index * config.block_q, own)
        before, dk, dv = state
        p, slope, dp = self.scores_and_products(group, stage, tile, masked)
        delta = self.column("delta_tiles", stage)
        dv, ds = self.add_values(dv, p, dp, delta, stage)
        if self.kernel.wants_bias:
            self.add_bias(group, tile, ds)
        if slope is not None:
            ds *= slope
        ds = ds.astype(self.dtype)
        if not self.kernel.has_dq:
            dk = self.add_product(dk, ds, self.scratch["q_tiles"].at[stage])
            hopper.arrive(side.free + stage, side.everyone)
            return before, dk, dv
        dk, dq = self.add_keys(dk, ds, group, stage, slot)
        hopper.arrive(side.free + stage, side.everyone)
        plgpu.barrier_arrive(self.scratch["ds_ready"].at[slot])
        self.add_queries(group, before, dq)
        return (tile.head, index), dk, dv

    def scores_and_products(self, group, stage, tile: Tile, masked):
        """Returns P^T, the slope of the cap or None, and dP^T = v dout^T."""
        scratch = self.scratch
        plgpu.barrier_wait(scratch["q_ready"].at[stage])
        q = scratch["q_tiles"].at[stage].transpose((1, 0))
        dout = scratch["dout_tiles"].at[stage].transpose((1, 0))

        def multiply(raw, products):
            plgpu.wgmma(raw, scratch["k_tile"].at[group], q)
            plgpu.barrier_wait(scratch["dout_ready"].at[stage])
            plgpu.wgmma(products, scratch["v_tile"].at[group], dout)
            if self.kernel.interpret:
                scores = raw[...]
            else:
                scores = plgpu.wgmma_accumulator_load(raw, wait_n=1)
            p, slope = self.probabilities(scores, stage, tile, masked)
            return (p, products[...]) if slope is None else (p, products[...], slope)

        acc = hopper.ACC(self.shape, jnp.float32)
        p, products, *slope = pl.run_scoped(multiply, acc, acc)
        return p, slope[0] if slope else None, products

    def add_values(self, dv, p, dp, delta, stage):
        """Returns dV + P^T dout, and dS^T = P^T * (dP^T - delta)."""
        dout, narrow = self.scratch["dout_tiles"].at[stage], p.astype(self.dtype)
        if self.kernel.interpret:
            dv += hopper.interpreted_product(narrow, dout)
            return dv, p * (dp - delta)

        def multiply(refs):
            dv, ds = refs
            plgpu.wgmma(dv, narrow, dout)
            ds[...] = p * (ds[...] - delta)

        return pl.run_state(multiply)((hopper.ACC.init(dv), dp))

    def add_keys(self, dk, ds, group, stage, slot):
        """Returns dK + dS^T q, and this warpgroup's part of dQ of the tile before.

        The other warpgroups' dS^T of that tile are there, or nearly: none has to wait
        for the slowest at each tile. This one's go to memory meanwhile.
        """
        queries = self.scratch["q_tiles"].at[stage]
        part = self.kernel.config.dq_part(self.kernel.problem.head_dim)

        def multiply(dq):
            if self.kernel.interpret:
                total = dk + hopper.interpreted_product(ds, queries)
                self.write_ds(group, slot, ds)
                self.multiply_queries(dq, group, 1 - slot)
                return total, dq[...]

            def with_keys(dk):
                plgpu.wgmma(dk, ds, queries)
                self.write_ds(group, slot, ds)
                self.multiply_queries(dq, group, 1 - slot)

            return pl.run_state(with_keys)(hopper.ACC.init(dk)), dq[...]

        return pl.run_scoped(multiply, hopper.ACC(part, jnp.float32))

    def last_queries(self, group, slot):
        """Returns this warpgroup's part of dQ of the last tile."""
        part = self.kernel.config.dq_part(self.kernel.problem.head_dim)

        def multiply(dq):
            self.multiply_queries(dq, group, slot)
            return dq[...]

        return pl.run_scoped(multiply, hopper.ACC(part, jnp.float32))

    def multiply_queries(self, dq, group, slot) -> None:
        """Adds this warpgroup's part of dS k, of all keys of the block."""
        config, head_dim = self.kernel.config, self.kernel.problem.head_dim
        part = config.dq_part(head_dim)
        plgpu.barrier_wait(self.scratch["ds_ready"].at[slot])
        for other in range(config.compute_warpgroups):
            scores = self.scratch["ds_tiles"].at[slot, other]
            keys = self.scratch["k_tile"].at[other]
            if part[0] < config.block_q:
                scores = scores.at[:, pl.ds(group * part[0], part[0])]
            if part[1] < head_dim:
                keys = keys.at[:, pl.ds(group * part[1], part[1])]
            plgpu.wgmma(dq, scores.transpose((1, 0)), keys)

    def write_ds(self, group, slot, ds) -> None:
        """Puts dS^T where the products for dQ read it.

        The others have read what was there: they arrive at `ds_ready` of a tile when
        their products of the tile before are done.
        """
        self.scratch["ds_tiles"][slot, group] = ds
        plgpu.commit_smem()

    def add_queries(self, group, place, dq) -> None:
        """Adds this warpgroup's part of dQ in memory, at (head, tile)."""
        rows, columns = self.kernel.config.dq_part(self.kernel.problem.head_dim)
        head, index = place
        query, column = index * self.kernel.config.block_q, group * columns
        if rows < self.kernel.config.block_q:
            query, column = query + group * rows, 0
        target = self.sums["q"].at[
            self.side.batch, pl.ds(query, rows), head, pl.ds(column, columns)
        ]
        self.add(dq, self.scratch["dq_tile"].at[group], target)

    def add_bias(self, group, tile: Tile, ds) -> None:
        """Adds the gradient of the bias in memory."""
        shape = self.kernel.problem.bias
        assert shape is not None
        target = self.sums["bias"].at[
            0 if shape[0] == 1 and self.kernel.has_dq else tile.batch,
            0 if shape[1] == 1 and self.kernel.has_dq else tile.head,
            pl.ds(tile.key, self.shape[0]),
            pl.ds(tile.query, self.shape[1]),
        ]
        self.add(ds, self.scratch["dbias_tile"].at[group], target)

    def write(self, group, own, dk, dv) -> None:
        """Writes the gradients of the keys and values."""
        side, rows = self.side, pl.ds(own, KEYS_OF_WARPGROUP)
        for value, name, target in ((dk, "k_tile", self.dk), (dv, "v_tile", self.dv)):
            tile = self.scratch[name].at[group]
            tile[...] = value.astype(self.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, target.at[side.batch, rows, side.kv_head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
