"""Attention on Hopper GPUs: the gradient of the queries, in a kernel of its own.

It takes one tile of keys after the other for its queries, as the forward pass does, so
that nothing is added in memory: two runs agree bit for bit. It makes scores and their
gradients a second time, which the kernel of the keys has made already.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hopper
from pallas_kernels.attention.gpu_backward_plan import BackwardConfig
from pallas_kernels.attention.gpu_forward_plan import (
    ROWS_OF_WARPGROUP,
    Kernel,
)
from pallas_kernels.attention.gpu_scores import Scores, Span, Tile
from pallas_kernels.attention.problem import AttentionProblem, Operands


def gradient_of_queries(
    problem: AttentionProblem,
    config: BackwardConfig,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Computes dQ.

    Args:
      problem: what; one that `gpu.unsupported` has nothing against.
      config: how; one of two kernels.
      operands: the arrays.
      lse: float32 [B,H,T] in units of log(2), whole tiles; +inf for no probabilities.
      delta: float32 [B,H,T], whole tiles.
      dout: [B,T,H,Dv].
      interpret: the kernel is to run in the interpret mode.

    Returns:
      dQ [B,T,H,D] in `problem.dtype`.
    """
    shape = config.queries_kernel(problem)
    kernel = Kernel(problem, shape, interpret)
    scores = Scores(problem, shape.block_q, shape.block_kv)
    q, k, v, dout = (
        hopper.padded(x, 1, 8) for x in (operands.q, operands.k, operands.v, dout)
    )
    run = plgpu.kernel(
        functools.partial(_body, kernel, scores),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=_scratch(kernel),
        grid=(kernel.work,),
        grid_names=("block",),
        num_threads=shape.compute_warpgroups + 1,
        thread_name="wg",
        compiler_params=hopper.compiler_params(),
    )
    dq = run(q, k, v, dout, lse, delta, *scores.arrays(operands))
    return dq[:, : problem.q_len]


def _scratch(kernel: Kernel) -> dict:
    problem, config = kernel.problem, kernel.config
    dtype = jnp.dtype(problem.dtype)
    groups, stages = config.compute_warpgroups, config.stages
    rows, keys = (groups, ROWS_OF_WARPGROUP), (stages, config.block_kv)
    return {
        "q_tile": hopper.tiled((*rows, problem.head_dim), dtype),
        "dout_tile": hopper.tiled((*rows, problem.value_dim), dtype),
        "k_tiles": hopper.tiled((*keys, problem.head_dim), dtype),
        "v_tiles": hopper.tiled((*keys, problem.value_dim), dtype),
        "q_ready": plgpu.Barrier(num_arrivals=2, num_barriers=groups),
        "k_ready": plgpu.Barrier(num_barriers=stages),
        "v_ready": plgpu.Barrier(num_barriers=stages),
    }


def _body(kernel: Kernel, scores: Scores, *refs, **scratch) -> None:
    q, k, v, dout, lse, delta, *extra, dq = refs
    group = lax.axis_index("wg")
    groups = kernel.config.compute_warpgroups
    many, few = kernel.config.registers()
    block = _Block(kernel, scores, scores.named(extra), scratch)

    @pl.when(group < groups)
    def _():
        plgpu.set_max_registers(many, action="increase")
        _Compute(block, lse, delta, dq).run(group)

    @pl.when(group == groups)
    def _():
        plgpu.set_max_registers(few, action="decrease")
        _copy(block, q, k, v, dout)


class _Block:
    """What both kinds of warpgroups know."""

    def __init__(self, kernel: Kernel, scores: Scores, refs: dict, scratch: dict):
        self.kernel, self.scores, self.refs = kernel, scores, refs
        self.scratch = scratch
        self.batch, self.head, tile = kernel.place(lax.axis_index("block"))
        self.query = tile * kernel.config.block_q
        groups = kernel.config.compute_warpgroups
        self.k_free = groups + 2  # Pallas's own barriers come before
        self.v_free = self.k_free + kernel.config.stages
        self.everyone = hopper.WARPGROUP * (groups + 1)

    def span(self, own) -> Span:
        """Returns the tiles of keys that the block needs."""
        return self.scores.span(
            self.refs, self.batch, self.query, self.kernel.config.block_q, own,
            ROWS_OF_WARPGROUP,
        )  # fmt: skip


def _copy(block: _Block, q, k, v, dout) -> None:
    """Copies the tiles of queries, then all tiles of keys."""
    kernel, scratch, config = block.kernel, block.scratch, block.kernel.config
    for group in range(config.compute_warpgroups):
        rows = pl.ds(block.query + group * ROWS_OF_WARPGROUP, ROWS_OF_WARPGROUP)
        for array, name in ((q, "q_tile"), (dout, "dout_tile")):
            plgpu.copy_gmem_to_smem(
                array.at[block.batch, rows, block.head],
                scratch[name].at[group],
                scratch["q_ready"].at[group],
            )
    span = block.span(block.query)
    kv_head = lax.div(block.head, kernel.problem.group)

    def copy_tile(index, step):
        stage = lax.rem(step, config.stages)
        keys = pl.ds(index * config.block_kv, config.block_kv)
        for array, name, free in ((k, "k", block.k_free), (v, "v", block.v_free)):
            hopper.sync(free + stage, block.everyone)
            plgpu.copy_gmem_to_smem(
                array.at[block.batch, keys, kv_head],
                scratch[f"{name}_tiles"].at[stage],
                scratch[f"{name}_ready"].at[stage],
            )
        return step + 1

    lax.fori_loop(span.first, span.end, copy_tile, block.query * 0)


class _Compute:
    """A compute warpgroup.

    Args:
      block: what it shares with the others.
      lse, delta: numbers of each query, in global memory.
      dq: the result in global memory.
    """

    def __init__(self, block: _Block, lse, delta, dq):
        self.block, self.kernel, self.scratch = block, block.kernel, block.scratch
        self.lse, self.delta, self.dq = lse, delta, dq
        self.shape = (ROWS_OF_WARPGROUP, self.kernel.config.block_kv)
        self.dtype = self.scratch["q_tile"].dtype

    def run(self, group) -> None:
        """Computes dQ of the queries of the warpgroup."""
        block, problem = self.block, self.kernel.problem
        for stage in range(self.kernel.config.stages):
            hopper.arrive(block.k_free + stage, block.everyone)
            hopper.arrive(block.v_free + stage, block.everyone)
        own = block.query + group * ROWS_OF_WARPGROUP
        span = block.span(own)
        rows = pl.ds(own, ROWS_OF_WARPGROUP)
        lse, delta = (
            plgpu.load(
                x.at[block.batch, block.head, rows], layout=hopper.ROWS, optimized=False
            )
            for x in (self.lse, self.delta)
        )
        plgpu.barrier_wait(self.scratch["q_ready"].at[group])
        step = functools.partial(self.step, group, own, span, lse, delta)
        zeros = hopper.zeros((ROWS_OF_WARPGROUP, problem.head_dim))
        self.write(group, rows, self.each_tile(step, span, zeros) * problem.scale)

    def each_tile(self, step, span: Span, dq):
        """Folds step(masked, tile, dq) over the tiles of keys."""
        masked, plain = functools.partial(step, True), functools.partial(step, False)
        scores = self.block.scores
        if not scores.hides:
            return lax.fori_loop(span.first, span.end, plain, dq)
        if scores.hides_by_data:
            return lax.fori_loop(span.first, span.end, masked, dq)
        dq = lax.fori_loop(span.first, span.full_first, masked, dq)
        dq = lax.fori_loop(span.full_first, span.full_end, plain, dq)
        return lax.fori_loop(span.full_end, span.end, masked, dq)

    def step(self, group, own, span: Span, lse, delta, masked, index, dq):
        """Adds what one tile of keys contributes."""
        block, config = self.block, self.kernel.config
        stage = lax.rem(index - span.first, config.stages)
        tile = Tile(block.batch, block.head, own, index * config.block_kv)
        p, slope, dp = self.scores_and_products(group, stage, tile, lse, masked)
        hopper.arrive(block.v_free + stage, block.everyone)
        ds = p * (dp - hopper.spread(delta, self.shape))
        if slope is not None:
            ds *= slope
        dq = self.add_keys(dq, ds.astype(self.dtype), stage)
        hopper.arrive(block.k_free + stage, block.everyone)
        return dq

    def scores_and_products(self, group, stage, tile: Tile, lse, masked):
        """Returns P, the slope of the cap or None, and dP = dout v^T."""
        scratch = self.scratch
        plgpu.barrier_wait(scratch["k_ready"].at[stage])
        keys = scratch["k_tiles"].at[stage].transpose((1, 0))
        values = scratch["v_tiles"].at[stage].transpose((1, 0))

        def multiply(raw, products):
            plgpu.wgmma(raw, scratch["q_tile"].at[group], keys)
            plgpu.barrier_wait(scratch["v_ready"].at[stage])
            plgpu.wgmma(products, scratch["dout_tile"].at[group], values)
            if self.kernel.interpret:
                found = raw[...]
            else:
                found = plgpu.wgmma_accumulator_load(raw, wait_n=1)
            p, slope = self.probabilities(found, tile, lse, masked)
            return (p, products[...]) if slope is None else (p, products[...], slope)

        acc = hopper.ACC(self.shape, jnp.float32)
        p, products, *slope = pl.run_scoped(multiply, acc, acc)
        return p, slope[0] if slope else None, products

    def probabilities(self, raw, tile: Tile, lse, masked):
        """Returns P, and the slope of the cap or None."""
        scores = self.block.scores
        x, factor, slope = scores.capped(raw)
        x, factor = scores.in_log2(x, factor, self.block.refs, tile, masked)
        return jnp.exp2(x * factor - hopper.spread(lse, self.shape)), slope

    def add_keys(self, dq, ds, stage):
        """Returns dQ + dS k."""
        keys = self.scratch["k_tiles"].at[stage]
        if self.kernel.interpret:
            return dq + hopper.interpreted_product(ds, keys)
        return pl.run_state(lambda acc: plgpu.wgmma(acc, ds, keys))(hopper.ACC.init(dq))

    def write(self, group, rows, dq) -> None:
        """Writes dQ, by way of the place of q, which nobody needs any more."""
        tile = self.scratch["q_tile"].at[group]
        tile[...] = dq.astype(self.dtype)
        plgpu.commit_smem()
        target = self.dq.at[self.block.batch, rows, self.block.head]
        plgpu.copy_smem_to_gmem(tile, target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
