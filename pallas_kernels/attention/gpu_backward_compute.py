"""The warpgroups of the backward kernel for Hopper GPUs that multiply."""

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


class Compute:
    """A compute warpgroup.

    Args:
      side: what it shares with the others.
      dk, dv: results in global memory.
      sums: dQ, and the gradient of the bias if wanted, in global memory.
    """

    def __init__(self, side: Side, dk, dv, sums):
        self.side, self.kernel, self.scratch = side, side.kernel, side.scratch
        self.dk, self.dv, self.sums = dk, dv, sums
        self.dtype = self.scratch["k_tile"].dtype
        self.shape = (KEYS_OF_WARPGROUP, self.kernel.config.block_q)

    def run(self, group) -> None:
        """Computes the gradients of the tile of keys."""
        side, problem = self.side, self.kernel.problem
        for stage in range(self.kernel.config.q_stages):
            hopper.arrive(side.q_free + stage, side.everyone)
        for stage in range(self.kernel.config.dout_stages):
            hopper.arrive(side.dout_free + stage, side.everyone)
        own = side.key + group * KEYS_OF_WARPGROUP
        span = side.span(own)
        plgpu.barrier_wait(self.scratch["kv_ready"])
        dk, dv = side.each_head(
            functools.partial(self.each_tile, group, own, span),
            (
                hopper.zeros((KEYS_OF_WARPGROUP, problem.head_dim)),
                hopper.zeros((KEYS_OF_WARPGROUP, problem.value_dim)),
            ),
        )
        plgpu.wait_smem_to_gmem(0)
        hopper.sync(side.together, side.compute_threads)
        self.write(group, own, dk * problem.scale, dv)

    def each_tile(self, group, own, span: Span, member, state):
        """Takes one tile of queries of a head after the other.

        What a tile gives to dQ and dK is multiplied while the next one's exponentials
        are taken.
        """
        at = functools.partial(_At, self, group, own, span, member)
        dk, dv = state

        def some():
            first = at(span.first)
            p, slope = first.start(self.kernel.scores.hides)
            new_dv, ds = first.finish(p, slope, dv, None)
            new_dk, new_dv, ds = self.each_span(at, span, (dk, new_dv, ds))
            last = at(span.end - 1)
            return last.flush(new_dk, ds), new_dv

        return lax.cond(span.first < span.end, some, lambda: (dk, dv))

    def each_span(self, at, span: Span, state):
        """Takes all tiles but the first, with masks where they are needed."""

        def step(masked, index, state):
            dk, dv, ds = state
            tile = at(index)
            dk, dq, p, slope = tile.start_after(masked, dk, ds)
            dv, ds = tile.finish(p, slope, dv, dq)
            return dk, dv, ds

        masked, plain = functools.partial(step, True), functools.partial(step, False)
        first = span.first + 1
        if not self.kernel.scores.hides:
            return lax.fori_loop(first, span.end, plain, state)
        if self.kernel.scores.hides_by_data:
            return lax.fori_loop(first, span.end, masked, state)
        full_first = jnp.maximum(span.full_first, first)
        full_end = jnp.maximum(span.full_end, first)
        state = lax.fori_loop(first, full_first, masked, state)
        state = lax.fori_loop(full_first, full_end, plain, state)
        return lax.fori_loop(full_end, span.end, masked, state)

    def write(self, group, own, dk, dv) -> None:
        """Writes the gradients of the keys and values."""
        side, rows = self.side, pl.ds(own, KEYS_OF_WARPGROUP)
        for value, name, target in ((dk, "k_tile", self.dk), (dv, "v_tile", self.dv)):
            tile = self.scratch[name].at[group]
            tile[...] = value.astype(self.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, target.at[side.batch, rows, side.kv_head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class _At:
    """One tile of queries, as one warpgroup sees it.

    Args:
      compute: the warpgroup.
      group: its number.
      own: its first key.
      span: the tiles of queries of a head.
      member: which of the query heads.
      index: the tile.
    """

    def __init__(self, compute: Compute, group, own, span: Span, member, index):
        side, config = compute.side, compute.kernel.config
        self.compute, self.group = compute, group
        self.kernel, self.scratch, self.side = compute.kernel, compute.scratch, side
        self.shape, self.dtype = compute.shape, compute.dtype
        self.number = member * (span.end - span.first) + index - span.first
        self.q_stage = lax.rem(self.number, config.q_stages)
        self.dout_stage = lax.rem(self.number, config.dout_stages)
        query = index * config.block_q
        self.tile = Tile(side.batch, side.head(member), query, own)

    def before(self) -> tuple:
        """Returns the stage of q and the slot of dS^T of the tile before."""
        config = self.kernel.config
        number = self.number + config.q_stages - 1
        return lax.rem(number, config.q_stages), lax.rem(self.number + 1, 2)

    def multiply_scores(self, raw) -> None:
        plgpu.barrier_wait(self.scratch["q_ready"].at[self.q_stage])
        q = self.scratch["q_tiles"].at[self.q_stage].transpose((1, 0))
        plgpu.wgmma(raw, self.scratch["k_tile"].at[self.group], q)

    def start(self, masked):
        """Returns P^T, and the slope of the cap or None."""

        def multiply(raw):
            self.multiply_scores(raw)
            return raw[...]

        raw = pl.run_scoped(multiply, plgpu.ACC(self.shape, jnp.float32))
        return self.probabilities(raw, masked)

    def start_after(self, masked, dk, ds):
        """Returns dK and dQ with the tile before, P^T, and the slope or None.

        Args:
          masked: whether a key may be hidden from a query.
          dk: without the tile before.
          ds: dS^T of the tile before.
        """
        stage, slot = self.before()
        queries = self.scratch["q_tiles"].at[stage]
        part = self.kernel.config.dq_part(self.kernel.problem.head_dim)
        groups = self.kernel.config.compute_warpgroups

        def multiply(raw, dq):
            self.multiply_scores(raw)
            if self.kernel.interpret:
                total = dk + hopper.interpreted_product(ds, queries)
                self.multiply_queries(dq, slot)
                p, slope = self.probabilities(raw[...], masked)
                return (
                    (total, dq[...], p) if slope is None else (total, dq[...], p, slope)
                )

            def with_keys(refs):
                dk, p, *slope = refs
                plgpu.wgmma(dk, ds, queries)
                self.multiply_queries(dq, slot)
                scores = plgpu.wgmma_accumulator_load(raw, wait_n=1 + groups)
                p[...], value = self.probabilities(scores, masked)
                if slope:
                    slope[0][...] = value

            room = [hopper.zeros(self.shape)] * (1 + self.has_slope)
            found = pl.run_state(with_keys)((plgpu.ACC.init(dk), *room))
            return found[0], dq[...], *found[1:]

        acc = functools.partial(plgpu.ACC, dtype=jnp.float32)
        dk, dq, p, *slope = pl.run_scoped(multiply, acc(self.shape), acc(part))
        hopper.arrive(self.side.q_free + stage, self.side.everyone)
        return dk, dq, p, slope[0] if slope else None

    @property
    def has_slope(self) -> bool:
        return self.kernel.problem.softcap is not None

    def multiply_queries(self, dq, slot) -> None:
        """Starts dS k of the tile before, this warpgroup's part."""
        config, head_dim = self.kernel.config, self.kernel.problem.head_dim
        part = config.dq_part(head_dim)
        hopper.sync(self.side.together, self.side.compute_threads)
        for other in range(config.compute_warpgroups):
            scores = self.scratch["ds_tiles"].at[slot, other]
            keys = self.scratch["k_tile"].at[other]
            if part[0] < config.block_q:
                scores = scores.at[:, pl.ds(self.group * part[0], part[0])]
            if part[1] < head_dim:
                keys = keys.at[:, pl.ds(self.group * part[1], part[1])]
            plgpu.wgmma(dq, scores.transpose((1, 0)), keys)

    def probabilities(self, raw, masked):
        """Returns P^T, and the slope of the cap or None."""
        scores = self.kernel.scores
        x, factor, slope = scores.capped(raw)
        x, factor = scores.in_log2(x, factor, self.side.refs, self.tile, masked)
        lse = self.column("lse_tiles", self.q_stage)
        return jnp.exp2(x * factor - lse), slope

    def column(self, name: str, stage) -> jax.Array:
        """Loads a number a query and repeats it for all keys."""
        numbers = plgpu.load(
            self.scratch[name].at[stage], layout=hopper.COLUMNS, optimized=False
        )
        return lax.broadcast_in_dim(numbers, self.shape, [1])

    def finish(self, p, slope, dv, dq):
        """Returns dV with this tile, and dS^T.

        Args:
          p: P^T.
          slope: of the cap, or None.
          dv: without this tile.
          dq: of the tile before, to be added in memory meanwhile, or None.
        """
        scratch, stage = self.scratch, self.dout_stage
        plgpu.barrier_wait(scratch["dout_ready"].at[stage])
        dout, narrow = scratch["dout_tiles"].at[stage], p.astype(self.dtype)
        values = scratch["v_tile"].at[self.group]

        def multiply(products):
            plgpu.wgmma(products, values, dout.transpose((1, 0)))
            if self.kernel.interpret:
                total = dv + hopper.interpreted_product(narrow, dout)
                self.add_queries(dq)
                return total, self.differences(p, products[...])

            def with_values(refs):
                dv, ds = refs
                plgpu.wgmma(dv, narrow, dout)
                self.add_queries(dq)
                dp = plgpu.wgmma_accumulator_load(products, wait_n=1)
                ds[...] = self.differences(ds[...], dp)

            return pl.run_state(with_values)((plgpu.ACC.init(dv), p))

        dv, ds = pl.run_scoped(multiply, plgpu.ACC(self.shape, jnp.float32))
        if self.kernel.wants_bias:
            self.add_bias(ds)
        if slope is not None:
            ds *= slope
        ds = ds.astype(self.dtype)
        scratch["ds_tiles"][lax.rem(self.number, 2), self.group] = ds
        plgpu.commit_smem()
        hopper.arrive(self.side.dout_free + stage, self.side.everyone)
        return dv, ds

    def differences(self, p, dp) -> jax.Array:
        """Returns P^T * (dP^T - delta)."""
        return p * (dp - self.column("delta_tiles", self.dout_stage))

    def flush(self, dk, ds) -> jax.Array:
        """Returns dK with this tile, which is the last; adds its dQ in memory."""
        queries = self.scratch["q_tiles"].at[self.q_stage]
        part = self.kernel.config.dq_part(self.kernel.problem.head_dim)
        slot = lax.rem(self.number, 2)

        def multiply(dq):
            if self.kernel.interpret:
                total = dk + hopper.interpreted_product(ds, queries)
                self.multiply_queries(dq, slot)
                return total, dq[...]

            def with_keys(dk):
                plgpu.wgmma(dk, ds, queries)
                self.multiply_queries(dq, slot)

            return pl.run_state(with_keys)(plgpu.ACC.init(dk)), dq[...]

        dk, dq = pl.run_scoped(multiply, plgpu.ACC(part, jnp.float32))
        hopper.arrive(self.side.q_free + self.q_stage, self.side.everyone)
        self.add_queries(dq, self.tile.query)
        return dk

    def add_queries(self, dq, query=None) -> None:
        """Adds this warpgroup's part of dQ in memory.

        Args:
          dq: the part, or None.
          query: the first of the tile; by default, of the tile before.
        """
        if dq is None:
            return
        config = self.kernel.config
        rows, columns = config.dq_part(self.kernel.problem.head_dim)
        query = self.tile.query - config.block_q if query is None else query
        column = self.group * columns
        if rows < config.block_q:
            query, column = query + self.group * rows, 0
        target = self.compute.sums[0].at[
            self.tile.batch, pl.ds(query, rows), self.tile.head, pl.ds(column, columns)
        ]
        self.add(dq, self.scratch["dq_tile"].at[self.group], target)

    def add_bias(self, ds) -> None:
        """Adds the gradient of the bias in memory."""
        shape = self.kernel.problem.bias
        tile = self.tile
        target = self.compute.sums[1].at[
            0 if shape[0] == 1 else tile.batch,
            0 if shape[1] == 1 else tile.head,
            pl.ds(tile.key, self.shape[0]),
            pl.ds(tile.query, self.shape[1]),
        ]
        self.add(ds, self.scratch["dbias_tile"].at[self.group], target)

    def add(self, value, staging, target) -> None:
        """Adds a tile in global memory, in any order with other blocks."""
        if self.kernel.interpret:  # it knows no copy that adds
            target[...] += value
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")
