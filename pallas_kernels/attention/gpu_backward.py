"""Attention on Hopper GPUs: the backward pass, in one kernel or in two.

A block keeps a tile of keys and values and takes one tile of queries after the other.
Each compute warpgroup has 64 keys, and the gradients of these in registers. It computes
scores as [keys, queries], so that P^T and dS^T are where the products for dV and dK
want them. All warpgroups' dS^T meet in shared memory for dQ, of which each computes a
part; the copy engine adds it to the others' in memory, in any order. Or dQ comes from
a second kernel, gpu_backward_queries.py, and is the same in every run.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hopper
from pallas_kernels.attention.gpu_backward_compute import Compute, flat_scratch
from pallas_kernels.attention.gpu_backward_deep import (
    KEYS,
    VALUES,
    Keys,
    Values,
    deep_scratch,
)
from pallas_kernels.attention.gpu_backward_plan import (
    KEYS_OF_WARPGROUP,
    BackwardConfig,
    Kernel,
    Side,
)
from pallas_kernels.attention.gpu_backward_queries import gradient_of_queries
from pallas_kernels.attention.gpu_scores import LOG2_E, Scores
from pallas_kernels.attention.problem import AttentionProblem, Gradients, Operands


def flash_backward(
    problem: AttentionProblem,
    config: BackwardConfig,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    wants_bias: bool = False,
    interpret: bool = False,
) -> Gradients:
    """Computes the gradients of attention.

    Args:
      problem: what; one that `gpu.unsupported` has nothing against.
      config: how.
      operands: the arrays.
      lse: float32 [B,H,T], of the forward pass.
      delta: float32 [B,H,T], the sum of out * dout over Dv.
      dout: [B,T,H,Dv].
      wants_bias: whether the gradient of the bias is wanted.
      interpret: the kernel is to run in the interpret mode.

    Returns:
      The gradients, in the dtypes of the operands.
    """
    scores = Scores(problem, config.block_q, config.block_kv, transposed=True)
    kernel = Kernel(problem, config, scores, wants_bias, interpret)
    q, dout = (hopper.padded(x, 1, 8) for x in (operands.q, dout))
    k, v = (hopper.padded(x, 1, 8) for x in (operands.k, operands.v))
    # A query without keys has -inf, which is to make all probabilities zero.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2_E)
    rows = config.block_q
    if config.two_kernels:
        rows = max(rows, config.queries_kernel(problem).block_q)
    lse = hopper.padded(lse, 2, rows, math.inf)
    delta = hopper.padded(delta, 2, rows)
    sums = _new_sums(kernel, q)
    run = plgpu.kernel(
        functools.partial(_body, kernel, tuple(sums)),
        out_type=(
            jax.ShapeDtypeStruct(k.shape, k.dtype),
            jax.ShapeDtypeStruct(v.shape, v.dtype),
        ),
        scratch_types=_scratch(kernel),
        grid=(kernel.work,),
        grid_names=("block",),
        num_threads=config.compute_warpgroups + 1,
        thread_name="wg",
        compiler_params=hopper.compiler_params(),
    )
    side_arrays = scores.arrays(operands)
    dk, dv = run(q, k, v, dout, lse, delta, *side_arrays, *sums.values())
    if kernel.has_dq:
        total = jax.freeze(sums["q"])[:, : problem.q_len]
        dq = (total * problem.scale).astype(q.dtype)
    else:
        dq = gradient_of_queries(problem, config, operands, lse, delta, dout, interpret)
    return Gradients(
        q=dq,
        k=dk[:, : problem.k_len],
        v=dv[:, : problem.k_len],
        bias=_bias_gradient(kernel, sums["bias"]) if wants_bias else None,
    )


def _new_sums(kernel: Kernel, q: jax.Array) -> dict[str, Any]:
    """Returns references to zeros that the blocks add to, "q" and "bias"."""
    sums = {}
    if kernel.has_dq:
        # whole tiles: those of the last queries are added as they are
        shape = hopper.padded(q, 1, kernel.config.block_q).shape
        sums["q"] = jax.new_ref(jnp.zeros(shape, jnp.float32))
    if kernel.wants_bias:
        sums["bias"] = jax.new_ref(jnp.zeros(_bias_shape(kernel), jnp.float32))
    return sums


def _bias_shape(kernel: Kernel) -> tuple[int, ...]:
    """Returns the shape of the gradient of the bias as the kernel adds it up."""
    problem = kernel.problem
    assert problem.bias is not None
    keys = kernel.tiles * kernel.config.block_kv
    queries = pl.cdiv(problem.q_len, kernel.config.block_q) * kernel.config.block_q
    if kernel.has_dq:
        return (*problem.bias[:2], keys, queries)
    # each place is added to once, so that the order does not matter
    return (problem.batch, problem.heads, keys, queries)


def _bias_gradient(kernel: Kernel, total) -> jax.Array:
    problem = kernel.problem
    assert problem.bias is not None
    full = jax.freeze(total)[..., : problem.k_len, : problem.q_len].swapaxes(2, 3)
    for dim in range(4):
        if problem.bias[dim] == 1 and full.shape[dim] > 1:
            full = full.sum(dim, keepdims=True)
    return full.astype(problem.bias_dtype)


def _scratch(kernel: Kernel) -> dict:
    problem, config = kernel.problem, kernel.config
    dtype = jnp.dtype(problem.dtype)
    stages, rows, groups = config.stages, config.block_q, config.key_groups
    dout_stages = config.dout_stages
    scratch = {
        "k_tile": hopper.tiled((groups, KEYS_OF_WARPGROUP, problem.head_dim), dtype),
        "v_tile": hopper.tiled((groups, KEYS_OF_WARPGROUP, problem.value_dim), dtype),
        "q_tiles": hopper.tiled((stages, rows, problem.head_dim), dtype),
        "dout_tiles": hopper.tiled((dout_stages, rows, problem.value_dim), dtype),
        "lse_tiles": plgpu.SMEM((stages, rows), jnp.float32),
        "delta_tiles": plgpu.SMEM((dout_stages, rows), jnp.float32),
        "kv_ready": plgpu.Barrier(num_arrivals=2 * groups),
        "q_ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "dout_ready": plgpu.Barrier(num_arrivals=2, num_barriers=dout_stages),
    }
    return scratch | (deep_scratch if config.deep else flat_scratch)(kernel)


def _body(kernel: Kernel, names, q, k, v, dout, lse, delta, *rest, **scratch) -> None:
    *extra, dk, dv = rest
    count = len(extra) - len(names)
    extra, sums = extra[:count], dict(zip(names, extra[count:], strict=True))
    refs = kernel.scores.named(extra)
    group = lax.axis_index("wg")
    groups = kernel.config.compute_warpgroups
    many, few = kernel.config.registers()
    side = Side(kernel, refs, scratch)

    @pl.when(group < groups)
    def _():
        plgpu.set_max_registers(many, action="increase")
        if not kernel.config.deep:
            Compute(side, dk, dv, sums).run(group)
            return

        @pl.when(group == VALUES)
        def _():
            Values(side, dv, sums).run()

        @pl.when(group == KEYS)
        def _():
            Keys(side, dk, sums).run()

    @pl.when(group == groups)
    def _():
        plgpu.set_max_registers(few, action="decrease")
        _copy(side, q, k, v, dout, lse, delta)


def _copy(side: Side, q, k, v, dout, lse, delta) -> None:
    """Copies the tile of keys, then all tiles of queries."""
    scratch, config = side.scratch, side.kernel.config
    span = side.span(side.key)
    for group in range(config.key_groups):
        keys = pl.ds(side.key + group * KEYS_OF_WARPGROUP, KEYS_OF_WARPGROUP)
        for array, name in ((k, "k_tile"), (v, "v_tile")):
            plgpu.copy_gmem_to_smem(
                array.at[side.batch, keys, side.kv_head],
                scratch[name].at[group],
                scratch["kv_ready"],
            )

    def copy_tile(member, index, step):
        head = side.head(member)
        rows = pl.ds(side.turned(index, span) * config.block_q, config.block_q)

        def copy(stage, name: str, tile, numbers_name: str, numbers) -> None:
            ready = scratch[f"{name}_ready"].at[stage]
            plgpu.copy_gmem_to_smem(
                tile.at[side.batch, rows, head],
                scratch[f"{name}_tiles"].at[stage],
                ready,
            )
            plgpu.copy_gmem_to_smem(
                numbers.at[side.batch, head, rows],
                scratch[f"{numbers_name}_tiles"].at[stage],
                ready,
            )

        stage = lax.rem(step, config.stages)
        hopper.sync(side.free + stage, side.everyone)
        copy(stage, "q", q, "lse", lse)
        if config.deep:
            stage = lax.rem(step, config.dout_stages)
            hopper.sync(side.dout_free + stage, side.everyone)
        copy(stage, "dout", dout, "delta", delta)
        return step + 1

    def copy_head(member, step):
        return lax.fori_loop(
            span.first, span.end, functools.partial(copy_tile, member), step
        )

    side.each_head(copy_head, side.key * 0)
