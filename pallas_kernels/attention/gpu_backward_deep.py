"""The warpgroups of the backward kernel for head dims above 128, on Hopper GPUs.

The gradients of 64 keys and as many values no longer fit beside each other in the
registers of a warpgroup. So two warpgroups share the keys: one computes P^T and keeps
dV, the other dP^T and keeps dK. They hand each other P^T and dS^T through shared
memory, and each computes half of the columns of dQ.
"""

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

VALUES, KEYS = 0, 1  # the warpgroups
DQ_COLUMNS = 64  # that are on their way to memory at a time


def deep_scratch(kernel: Kernel) -> dict:
    """Returns the shared memory that is not as in the kernel for small head dims."""
    shape = (KEYS_OF_WARPGROUP, kernel.config.block_q)
    probabilities = {
        "p_tile": hopper.tiled(shape, jnp.float32),
        "p_ready": plgpu.Barrier(),
        "p_free": plgpu.Barrier(),
    }
    if not kernel.has_dq:
        return probabilities
    return probabilities | {
        "ds_tiles": hopper.tiled((2, *shape), jnp.dtype(kernel.problem.dtype)),
        "dq_tile": hopper.tiled((2, kernel.config.block_q, DQ_COLUMNS), jnp.float32),
        "ds_ready": plgpu.Barrier(num_barriers=2),
    }


class _Deep(Worker):
    """One of the two warpgroups; `result` is its gradient in global memory."""

    group: int

    def __init__(self, side: Side, result, sums):
        super().__init__(side, sums)
        self.result = result
        self.half = self.kernel.problem.head_dim // 2
        # The lowering takes no constant index within `pl.run_state`.
        self.only = side.key * 0

    def begin(self) -> Span:
        """Frees all tiles; returns the tiles of queries."""
        side = self.side
        for stage in range(self.kernel.config.stages):
            hopper.arrive(side.free + stage, side.everyone)
        hopper.arrive(side.dout_free, side.everyone)
        return side.span(side.key)

    def place(self, span: Span, member, index):
        """Returns (stage of q, slot of dS, tile of queries, their tile of scores)."""
        side, config = self.side, self.kernel.config
        number = member * (span.end - span.first) + index - span.first
        index = side.turned(index, span)
        tile = Tile(side.batch, side.head(member), index * config.block_q, side.key)
        return lax.rem(number, config.stages), lax.rem(number, 2), index, tile

    def multiply_queries(self, dq, slot) -> None:
        """Adds this warpgroup's columns of dS k."""
        keys = self.scratch["k_tile"].at[
            self.only, :, pl.ds(self.group * self.half, self.half)
        ]
        plgpu.wgmma(dq, self.scratch["ds_tiles"].at[slot].transpose((1, 0)), keys)

    def add_queries(self, place, dq) -> None:
        """Adds this warpgroup's columns of dQ in memory, at (head, tile)."""
        head, index = place
        rows = pl.ds(index * self.kernel.config.block_q, self.kernel.config.block_q)
        for first in range(0, self.half, DQ_COLUMNS):
            columns = pl.ds(self.group * self.half + first, DQ_COLUMNS)
            target = self.sums["q"].at[self.side.batch, rows, head, columns]
            part = dq[:, first : first + DQ_COLUMNS]
            self.add(part, self.scratch["dq_tile"].at[self.group], target)

    def queries(self):
        """Returns an accumulator for this warpgroup's columns of dQ."""
        return hopper.ACC((self.kernel.config.block_q, self.half), jnp.float32)

    def write(self, name: str, value) -> None:
        """Writes a result in the place of an operand that nobody needs any more."""
        plgpu.wait_smem_to_gmem(0)
        hopper.sync(self.side.together, self.side.compute_threads)
        tile = self.scratch[name].at[self.only]
        tile[...] = value.astype(self.dtype)
        plgpu.commit_smem()
        rows = pl.ds(self.side.key, KEYS_OF_WARPGROUP)
        plgpu.copy_smem_to_gmem(
            tile, self.result.at[self.side.batch, rows, self.side.kv_head]
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class Values(_Deep):
    """Computes P^T, dV, and the first columns of dQ, of the tile before."""

    group = VALUES

    def run(self) -> None:
        """Computes dV of the tile of keys."""
        side, problem = self.side, self.kernel.problem
        span = self.begin()
        plgpu.barrier_wait(self.scratch["kv_ready"])
        # of no tile, which adds nothing to the first
        before = (side.head(0), self.kernel.tile_inside(span.first))
        before, dv = side.each_head(
            functools.partial(self.each_tile, self.step, self.group, side.key, span),
            (before, hopper.zeros((KEYS_OF_WARPGROUP, problem.value_dim))),
        )
        plgpu.barrier_wait(self.scratch["p_free"])
        if self.kernel.has_dq:
            slot = lax.rem(problem.group * (span.end - span.first) + 1, 2)
            plgpu.barrier_wait(self.scratch["ds_ready"].at[slot])

            def multiply(dq):
                self.multiply_queries(dq, slot)
                return dq[...]

            self.add_queries(before, pl.run_scoped(multiply, self.queries()))
        self.write("v_tile", dv)

    def step(self, group, own, span: Span, member, masked, index, state):
        """Adds what one tile of queries contributes."""
        side, scratch = self.side, self.scratch
        stage, slot, index, tile = self.place(span, member, index)
        before, dv = state
        plgpu.barrier_wait(scratch["q_ready"].at[stage])

        def multiply(raw):
            q = scratch["q_tiles"].at[stage].transpose((1, 0))
            plgpu.wgmma(raw, scratch["k_tile"].at[self.only], q)
            return raw[...]

        raw = pl.run_scoped(multiply, hopper.ACC(self.shape, jnp.float32))
        p, slope = self.probabilities(raw, stage, tile, masked)
        self.order_reads()
        hopper.arrive(side.free + stage, side.everyone)
        plgpu.barrier_wait(scratch["p_free"])
        scratch["p_tile"][...] = p if slope is None else p * slope
        plgpu.barrier_arrive(scratch["p_ready"])
        plgpu.barrier_wait(scratch["dout_ready"].at[self.only])
        p = p.astype(self.dtype)
        if not self.kernel.has_dq:
            dv = self.add_product(dv, p, scratch["dout_tiles"].at[self.only])
            hopper.arrive(side.dout_free, side.everyone)
            return before, dv
        dv, dq = self.add_values(dv, p, 1 - slot)
        hopper.arrive(side.dout_free, side.everyone)
        self.add_queries(before, dq)
        return (tile.head, index), dv

    def add_values(self, dv, p, slot):
        """Returns dV + P^T dout, and columns of dQ of the tile before."""
        dout = self.scratch["dout_tiles"].at[self.only]

        def queries(dq) -> None:
            plgpu.barrier_wait(self.scratch["ds_ready"].at[slot])
            self.multiply_queries(dq, slot)

        def multiply(dq):
            if self.kernel.interpret:
                total = dv + hopper.interpreted_product(p, dout)
                queries(dq)
                return total, dq[...]

            def with_values(dv):
                plgpu.wgmma(dv, p, dout)
                queries(dq)

            return pl.run_state(with_values)(hopper.ACC.init(dv)), dq[...]

        return pl.run_scoped(multiply, self.queries())


class Keys(_Deep):
    """Computes dP^T, dS^T, dK, and the last columns of dQ."""

    group = KEYS

    def run(self) -> None:
        """Computes dK of the tile of keys."""
        problem, side = self.kernel.problem, self.side
        span = self.begin()
        plgpu.barrier_arrive(self.scratch["p_free"])
        if self.kernel.has_dq:
            self.write_ds(1, hopper.zeros(self.shape).astype(self.dtype))
        plgpu.barrier_wait(self.scratch["kv_ready"])

        def each_tile(member, dk):
            step = functools.partial(self.step, span, member)
            return lax.fori_loop(span.first, span.end, step, dk)

        dk = hopper.zeros((KEYS_OF_WARPGROUP, problem.head_dim))
        self.write("k_tile", side.each_head(each_tile, dk) * problem.scale)

    def step(self, span: Span, member, index, dk):
        """Adds what one tile of queries contributes."""
        side, scratch = self.side, self.scratch
        stage, slot, index, tile = self.place(span, member, index)
        plgpu.barrier_wait(scratch["dout_ready"].at[self.only])

        def multiply(products):
            dout = scratch["dout_tiles"].at[self.only].transpose((1, 0))
            plgpu.wgmma(products, scratch["v_tile"].at[self.only], dout)
            return products[...]

        dp = pl.run_scoped(multiply, hopper.ACC(self.shape, jnp.float32))
        dp -= self.column("delta_tiles", 0)
        self.order_reads()
        hopper.arrive(side.dout_free, side.everyone)
        plgpu.barrier_wait(scratch["p_ready"])
        p = plgpu.load(scratch["p_tile"], layout=hopper.WGMMA)
        ds = (p * dp).astype(self.dtype)
        plgpu.barrier_arrive(scratch["p_free"])
        if not self.kernel.has_dq:
            plgpu.barrier_wait(scratch["q_ready"].at[stage])
            dk = self.add_product(dk, ds, scratch["q_tiles"].at[stage])
            hopper.arrive(side.free + stage, side.everyone)
            return dk
        self.write_ds(slot, ds)
        plgpu.barrier_wait(scratch["q_ready"].at[stage])
        dk, dq = self.add_keys(dk, ds, stage, slot)
        hopper.arrive(side.free + stage, side.everyone)
        self.add_queries((tile.head, index), dq)
        return dk

    def write_ds(self, slot, ds) -> None:
        """Hands dS^T over; what was there has been read, or there would be no P^T."""
        self.scratch["ds_tiles"][slot] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["ds_ready"].at[slot])

    def add_keys(self, dk, ds, stage, slot):
        """Returns dK + dS^T q, and columns of dQ."""
        queries = self.scratch["q_tiles"].at[stage]

        def multiply(dq):
            if self.kernel.interpret:
                total = dk + hopper.interpreted_product(ds, queries)
                self.multiply_queries(dq, slot)
                return total, dq[...]

            def with_keys(dk):
                plgpu.wgmma(dk, ds, queries)
                self.multiply_queries(dq, slot)

            return pl.run_state(with_keys)(hopper.ACC.init(dk)), dq[...]

        return pl.run_scoped(multiply, self.queries())
