"""The warpgroups of the forward kernel for Hopper GPUs that multiply."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hopper
from pallas_kernels.attention.gpu_forward_plan import (
    ROWS_OF_WARPGROUP,
    Barriers,
    Kernel,
)
from pallas_kernels.attention.gpu_scores import Scores, Span, Tile


class _Item(NamedTuple):
    """The queries that a warpgroup is at.

    Attributes:
      group: the warpgroup.
      batch, head, query: of the first query.
      span: tiles of keys.
      done: tiles of keys that the block has left behind before.
    """

    group: Any
    batch: Any
    head: Any
    query: Any
    span: Span
    done: Any


class Compute:
    """A compute warpgroup.

    Args:
      kernel: the problem, cut.
      scores: what is done to scores.
      refs: what `scores` reads.
      out, lse: the results in global memory.
      **scratch: shared memory and barriers.
    """

    def __init__(self, kernel: Kernel, scores: Scores, refs, out, lse, **scratch):
        self.kernel, self.scores, self.refs = kernel, scores, refs
        self.out, self.lse = out, lse
        self.q_tile, self.out_tile = scratch["q_and_out"]
        self.scratch = scratch
        self.barriers = Barriers(kernel.config)

    def run(self, group) -> None:
        """Computes everything that the block has to."""
        barriers, config = self.barriers, self.kernel.config
        for stage in range(config.stages):
            barriers.release(barriers.k_free + stage)
            barriers.release(barriers.v_free + stage)
        if config.persistent:
            barriers.release(barriers.q_free)

        @pl.when(group == config.compute_warpgroups - 1)
        def _():
            barriers.pass_turn(group)

        self.kernel.each_work(functools.partial(self.compute_work, group))

    def compute_work(self, group, number, done):
        """Computes one tile of queries; returns how many tiles of keys are done."""
        config = self.kernel.config
        batch, head, tile = self.kernel.place(number)
        query = tile * config.block_q
        own = query + group * ROWS_OF_WARPGROUP
        span = self.scores.span(
            self.refs, batch, query, config.block_q, own, ROWS_OF_WARPGROUP
        )
        item = _Item(group, batch, head, own, span, done)
        plgpu.barrier_wait(self.scratch["q_ready"].at[group])
        self.await_tile("k", item, span.first)
        self.barriers.wait_turn(group)
        loop = self.overlapped if config.overlap else self.in_turns
        acc, top, total = loop(item)
        self.barriers.pass_turn(group)
        if config.persistent:
            self.barriers.release(self.barriers.q_free)
        self.write(item, acc, top, total)
        return done + span.end - span.first

    def in_turns(self, item: _Item):
        """Multiplies, takes exponentials and multiplies again, tile by tile."""

        def step(masked, index, state):
            acc, top, total = state
            stage = self.stage(item, index)
            raw = self.product_with_keys(item, stage)
            p, alpha, top, total = self.softmax(item, index, raw, top, total, masked)
            acc *= hopper.spread(alpha, acc.shape)
            acc, p, top, total = lax.optimization_barrier((acc, p, top, total))
            plgpu.barrier_wait(self.scratch["v_ready"].at[stage])
            self.barriers.wait_turn(item.group)
            acc = self.add_values(item, acc, p, stage, index + 1)
            return acc, top, total

        span, banded = item.span, self.kernel.problem.band != (None, None)
        state = (self.no_values(), *self.no_sums())
        if not banded:
            return self.each_tile(step, span.first, span, state)
        self.skip(item, span.first, span.own_first)
        own = span._replace(end=span.own_end)
        state = self.each_tile(step, span.own_first, own, state)
        self.skip(item, span.own_end, span.end)
        return state

    def overlapped(self, item: _Item):
        """Begins the scores of a tile before the values of the one before."""
        first, end = item.span.first, item.span.end

        def start():
            raw = self.product_with_keys(item, self.stage(item, first))
            p, _, top, total = self.softmax(
                item, first, raw, *self.no_sums(), self.scores.hides
            )
            self.barriers.wait_turn(item.group)
            self.await_tile("k", item, first + 1)
            return p, top, total

        def step(masked, index, state):
            return self.overlapped_step(item, index, masked, *state)

        shape = (ROWS_OF_WARPGROUP, self.kernel.config.block_kv)
        p, top, total = lax.cond(
            first < end,
            start,
            lambda: (hopper.zeros(shape).astype(self.q_tile.dtype), *self.no_sums()),
        )
        state = (self.no_values(), top, total, p)
        acc, top, total, p = self.each_tile(step, first + 1, item.span, state)

        def finish():
            stage = self.stage(item, end - 1)
            plgpu.barrier_wait(self.scratch["v_ready"].at[stage])
            return self.add_values(item, acc, p, stage, end)

        return lax.cond(first < end, finish, lambda: acc), top, total

    def overlapped_step(self, item: _Item, index, masked, acc, top, total, p):
        """Multiplies q by the keys of a tile, p by the values of the one before."""
        stage, before = self.stage(item, index), self.stage(item, index - 1)
        plgpu.barrier_wait(self.scratch["v_ready"].at[before])
        if self.kernel.interpret:
            acc += hopper.interpreted_product(p, self.scratch["v_tiles"].at[before])
            self.barriers.release(self.barriers.v_free + before)
            raw = self.product_with_keys(item, stage)
            p, alpha, top, total = self.softmax(item, index, raw, top, total, masked)
        else:

            def both(raw, refs):
                acc, top, total, p, alpha = refs
                plgpu.wgmma(raw, self.q_tile.at[item.group], self.keys(stage))
                plgpu.wgmma(acc, p[...], self.scratch["v_tiles"].at[before])
                self.barriers.pass_turn(item.group)
                values = plgpu.wgmma_accumulator_load(raw, wait_n=1)
                self.barriers.release(self.barriers.k_free + stage)
                p[...], alpha[...], top[...], total[...] = self.softmax(
                    item, index, values, top[...], total[...], masked
                )

            def with_scores(raw):
                state = (hopper.ACC.init(acc), top, total, p, top)
                return pl.run_state(functools.partial(both, raw))(state)

            shape = (ROWS_OF_WARPGROUP, self.kernel.config.block_kv)
            acc, top, total, p, alpha = pl.run_scoped(
                with_scores, hopper.ACC(shape, jnp.float32)
            )
            self.barriers.release(self.barriers.v_free + before)
        acc *= hopper.spread(alpha, acc.shape)
        self.barriers.wait_turn(item.group)
        self.await_tile("k", item, index + 1)
        return acc, top, total, p

    def each_tile(self, step, first, span: Span, state):
        """Runs step(masked, index, state) over the tiles from `first` on."""
        masked = functools.partial(step, True)
        plain = functools.partial(step, False)
        if not self.scores.hides:
            return lax.fori_loop(first, span.end, plain, state)
        if self.scores.hides_by_data:
            return lax.fori_loop(first, span.end, masked, state)
        full_first = jnp.maximum(span.full_first, first)
        full_end = jnp.maximum(span.full_end, first)
        if self.kernel.problem.band[0] is not None:
            state = lax.fori_loop(first, full_first, masked, state)
        state = lax.fori_loop(full_first, full_end, plain, state)
        return lax.fori_loop(full_end, span.end, masked, state)

    def skip(self, item: _Item, first, end) -> None:
        """Lets tiles go by of which this warpgroup's queries see no key."""

        def one(index, _):
            stage = self.stage(item, index)
            self.barriers.release(self.barriers.k_free + stage)
            self.barriers.pass_turn(item.group)
            plgpu.barrier_wait(self.scratch["v_ready"].at[stage])
            self.barriers.release(self.barriers.v_free + stage)
            self.barriers.wait_turn(item.group)
            self.await_tile("k", item, index + 1)

        lax.fori_loop(first, end, one, None)

    def stage(self, item: _Item, index):
        """Returns where in shared memory a tile of keys is."""
        step = item.done + index - item.span.first
        return lax.rem(step, self.kernel.config.stages)

    def keys(self, stage):
        """Returns a tile of keys, [D,block_kv]."""
        return self.scratch["k_tiles"].at[stage].transpose((1, 0))

    def await_tile(self, name: str, item: _Item, index) -> None:
        """Waits until a tile is there, if it is one of the span."""

        @pl.when(index < item.span.end)
        def _():
            stage = self.stage(item, index)
            plgpu.barrier_wait(self.scratch[f"{name}_ready"].at[stage])

    def product_with_keys(self, item: _Item, stage) -> jax.Array:
        """Returns q k^T, float32 [rows,block_kv]; the next warpgroup's turn begins."""

        def multiply(raw):
            plgpu.wgmma(raw, self.q_tile.at[item.group], self.keys(stage))
            self.barriers.pass_turn(item.group)
            return raw[...]

        shape = (ROWS_OF_WARPGROUP, self.kernel.config.block_kv)
        raw = pl.run_scoped(multiply, hopper.ACC(shape, jnp.float32))
        self.barriers.release(self.barriers.k_free + stage)
        return raw

    def add_values(self, item: _Item, acc, p, stage, following) -> jax.Array:
        """Returns acc + p v; waits for the keys of the tile `following` meanwhile."""
        values = self.scratch["v_tiles"].at[stage]
        if self.kernel.interpret:
            acc += hopper.interpreted_product(p, values)
            self.await_tile("k", item, following)
        else:

            def multiply(acc):
                plgpu.wgmma(acc, p, values)
                self.await_tile("k", item, following)

            acc = pl.run_state(multiply)(hopper.ACC.init(acc))
        self.barriers.release(self.barriers.v_free + stage)
        return acc

    def softmax(self, item: _Item, index, raw, top, total, masked):
        """Returns (p in the dtype of q, factor of what there is, top, total)."""
        key = index * self.kernel.config.block_kv
        tile = Tile(item.batch, item.head, item.query, key)
        x, factor, _ = self.scores.capped(raw)
        x, factor = self.scores.in_log2(x, factor, self.refs, tile, masked)
        new_top = jnp.maximum(top, x.max(axis=1) * factor)
        shift = new_top
        if self.scores.hides or self.kernel.problem.bias is not None:
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        alpha = jnp.exp2(top - shift)
        p = jnp.exp2(x * factor - hopper.spread(shift, x.shape))
        total = self.grown(total, alpha, p)
        return p.astype(self.q_tile.dtype), alpha, new_top, total

    def grown(self, total, alpha, p) -> jax.Array:
        """Returns total * alpha and the sums of p, in each thread's own columns."""
        total *= hopper.spread(alpha, total.shape)
        for column in range(0, p.shape[1], hopper.THREAD_COLUMNS):
            total += p[:, column : column + hopper.THREAD_COLUMNS]
        return total

    def no_values(self) -> jax.Array:
        return hopper.zeros((ROWS_OF_WARPGROUP, self.kernel.problem.value_dim))

    def no_sums(self) -> tuple[jax.Array, jax.Array]:
        """Returns the maximum and the sum of no keys."""
        return (
            hopper.row_vector(ROWS_OF_WARPGROUP, -math.inf),
            hopper.zeros((ROWS_OF_WARPGROUP, hopper.THREAD_COLUMNS)),
        )

    def write(self, item: _Item, acc, top, total) -> None:
        """Writes the result of one tile of queries; zeros where there is no key."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
        total = total.sum(axis=1)
        inverse = jnp.where(total == 0, 0.0, 1.0 / total)
        logsumexp = (top + jnp.log2(total)) * math.log(2)
        out_tile = self.out_tile.at[item.group]
        lse_tile = self.scratch["lse_tile"].at[item.group]
        out_tile[...] = (acc * hopper.spread(inverse, acc.shape)).astype(out_tile.dtype)
        lse_tile[...] = jnp.where(total == 0, -jnp.inf, logsumexp)
        plgpu.commit_smem()
        rows = pl.ds(item.query, ROWS_OF_WARPGROUP)
        plgpu.copy_smem_to_gmem(
            lse_tile, self.lse.at[item.batch, item.head, rows], commit_group=False
        )
        plgpu.copy_smem_to_gmem(out_tile, self.out.at[item.batch, rows, item.head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
