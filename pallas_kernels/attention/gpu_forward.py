"""Attention on Hopper GPUs: the forward pass.

A block of threads takes the scores of 64 queries per compute warpgroup against one
tile of keys after the other. One warpgroup copies tiles of k and v ahead of them. The
compute warpgroups take turns: while one multiplies, the other takes exponentials.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hopper
from pallas_kernels.attention.gpu_forward_compute import Compute
from pallas_kernels.attention.gpu_forward_plan import (
    ROWS_OF_WARPGROUP,
    Barriers,
    ForwardConfig,
    Kernel,
)
from pallas_kernels.attention.gpu_scores import Scores
from pallas_kernels.attention.problem import AttentionProblem, Operands


def flash_forward(
    problem: AttentionProblem,
    config: ForwardConfig,
    operands: Operands,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention.

    Args:
      problem: what; one that `gpu.unsupported` has nothing against.
      config: how.
      operands: the arrays.
      interpret: the kernel is to run in the interpret mode.

    Returns:
      out [B,T,H,Dv] in `problem.dtype`, lse float32 [B,H,T].
    """
    kernel = Kernel(problem, config, interpret)
    scores = Scores(problem, config.block_q, config.block_kv)
    q, k, v = (hopper.padded(x, 1, 8) for x in operands[:3])
    rows = kernel.tiles * config.block_q
    dtype = jnp.dtype(problem.dtype)
    results = (
        jax.ShapeDtypeStruct((*q.shape[:3], problem.value_dim), dtype),
        jax.ShapeDtypeStruct((problem.batch, problem.heads, rows), jnp.float32),
    )
    blocks = min(hopper.multiprocessors(), kernel.work)
    run = plgpu.kernel(
        functools.partial(_body, kernel, scores),
        out_type=results,
        scratch_types=_scratch(kernel),
        grid=(blocks if config.persistent else kernel.work,),
        grid_names=("block",),
        num_threads=config.compute_warpgroups + 1,
        thread_name="wg",
        compiler_params=hopper.compiler_params(),
    )
    out, lse = run(q, k, v, *scores.arrays(operands))
    return out[:, : problem.q_len], lse[..., : problem.q_len]


def _scratch(kernel: Kernel) -> dict:
    problem, config = kernel.problem, kernel.config
    dtype = jnp.dtype(problem.dtype)
    groups, stages = config.compute_warpgroups, config.stages
    q = hopper.tiled((groups, ROWS_OF_WARPGROUP, problem.head_dim), dtype)
    out = hopper.tiled((groups, ROWS_OF_WARPGROUP, problem.value_dim), dtype)
    return {
        "q_and_out": plgpu.RefUnion(q, out) if config.shares(problem) else (q, out),
        "k_tiles": hopper.tiled((stages, config.block_kv, problem.head_dim), dtype),
        "v_tiles": hopper.tiled((stages, config.block_kv, problem.value_dim), dtype),
        "lse_tile": plgpu.SMEM((groups, ROWS_OF_WARPGROUP), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=groups),
        "k_ready": plgpu.Barrier(num_barriers=stages),
        "v_ready": plgpu.Barrier(num_barriers=stages),
    }


def _body(kernel: Kernel, scores: Scores, q, k, v, *rest, **scratch) -> None:
    *extra, out, lse = rest
    refs = scores.named(extra)
    group = lax.axis_index("wg")
    compute = Compute(kernel, scores, refs, out, lse, **scratch)
    copy = _Copy(kernel, scores, refs, q, k, v, **scratch)
    groups = kernel.config.compute_warpgroups
    many, few = kernel.config.registers()

    @pl.when(group < groups)
    def _():
        plgpu.set_max_registers(many, action="increase")
        compute.run(group)

    @pl.when(group == groups)
    def _():
        plgpu.set_max_registers(few, action="decrease")
        copy.run()


class _Copy:
    """The warpgroup that copies."""

    def __init__(self, kernel, scores, refs, q, k, v, **scratch):
        self.kernel, self.scores, self.refs = kernel, scores, refs
        self.arrays = (q, k, v)
        self.scratch = scratch
        self.barriers = Barriers(kernel.config)

    def run(self) -> None:
        self.kernel.each_work(self.copy_work)

    def copy_work(self, number, done):
        """Copies one tile of queries and all tiles of keys that it needs."""
        kernel, config = self.kernel, self.kernel.config
        batch, head, tile = kernel.place(number)
        query = tile * config.block_q
        span = self.scores.span(
            self.refs, batch, query, config.block_q, query, config.block_q
        )
        kv_head = lax.div(head, kernel.problem.group)

        def copy(which: int, index, step) -> None:
            stage = lax.rem(step, config.stages)
            name = ("k", "v")[which - 1]
            free = (self.barriers.k_free, self.barriers.v_free)[which - 1]
            self.barriers.wait_free(free + stage)
            keys = pl.ds(index * config.block_kv, config.block_kv)
            plgpu.copy_gmem_to_smem(
                self.arrays[which].at[batch, keys, kv_head],
                self.scratch[f"{name}_tiles"].at[stage],
                self.scratch[f"{name}_ready"].at[stage],
            )

        @pl.when(span.first < span.end)
        def _():
            copy(1, span.first, done)

        self.copy_queries(batch, head, query)

        def copy_tile(index, step):
            @pl.when(index > span.first)
            def _():
                copy(1, index, step)

            copy(2, index, step)
            return step + 1

        return lax.fori_loop(span.first, span.end, copy_tile, done)

    def copy_queries(self, batch, head, query) -> None:
        if self.kernel.config.persistent:
            self.barriers.wait_free(self.barriers.q_free)
        q_tile, _ = self.scratch["q_and_out"]
        for group in range(self.kernel.config.compute_warpgroups):
            rows = pl.ds(query + group * ROWS_OF_WARPGROUP, ROWS_OF_WARPGROUP)
            plgpu.copy_gmem_to_smem(
                self.arrays[0].at[batch, rows, head],
                q_tile.at[group],
                self.scratch["q_ready"].at[group],
            )
