"""Predicted times of attention with its backward pass; see cost.py for the forward.

Measured: [cpu] benchmarks/online_attention_grad_cpu.py on two cores, [h200] bfloat16
attention as usually written on one H200, S of 2048 to 8192, D of 64 and 128:
forward and backward at 131 to 263 TFLOP/s without a mask, 43 to 86 with a causal one.
"""

from __future__ import annotations

import jax.numpy as jnp

from hlo_tools.composites import AttentionSpec
from hlo_tools.gradients import GradSpec
from hlo_tools.targets import Target
from pallas_kernels.attention import cost

# Times that XLA writes or reads each of P, dP and dX in the backward pass, on average
# of the dtypes of scores and probabilities, and with masks or other changes the
# modified scores [h200].
NAIVE_PASSES = 4
NAIVE_PASSES_MODIFIED = 1
# The tiles of "online": beside those of the forward half the backward half computes
# X again and writes and reads P, dP and dX. Counted, not measured.
ONLINE_PASSES = 2.5

# Seconds of one core a score in the backward half, beside the products [cpu].
CPU_NAIVE = 11e-9
CPU_NAIVE_MASK = 2.5e-9
CPU_TILES = 3.8e-9
CPU_TILES_MASK = 1.0e-9
# Calls of the backward half for one tile; with fewer than 64 keys and queries they
# are most of its time [cpu].
CPU_TILE_CALLS = 6
# Buffers of the scores' size in XLA's own code: 3 to 4 [cpu].
CPU_NAIVE_BUFFERS = 3
# Against one forward pass where the products have few rows [cpu].
CPU_FEW_ROWS_NAIVE = 3.0
CPU_FEW_ROWS = 3.0


def naive_grad_seconds(spec: AttentionSpec, grad: GradSpec, target: Target) -> float:
    """Predicts the time of XLA's own code for a site and its backward pass."""
    forward = cost.naive_seconds(spec, target)
    modified = cost.is_modified(spec)
    if target.platform == "cpu":
        if _few_rows(spec):
            return forward * CPU_FEW_ROWS_NAIVE
        each = CPU_NAIVE + (CPU_NAIVE_MASK if modified else 0.0)
        products = _product_seconds(spec, grad, target, again=False)
        cores = min(cost.cores(target), cost.CPU_NAIVE_CORES)
        return forward + products + each * spec.score_count / cores
    sizes = _itemsize(spec.score_dtype) + _itemsize(spec.probs_dtype)
    traffic = NAIVE_PASSES * sizes
    if modified:
        traffic += NAIVE_PASSES_MODIFIED * _itemsize(spec.softmax_dtype)
    bandwidth = cost.BANDWIDTH_EFFICIENCY * target.spec.memory_bandwidth
    return (
        forward
        + _product_seconds(spec, grad, target, again=False) / cost.MATMUL_EFFICIENCY
        + traffic * spec.score_count / bandwidth
        + (3 + _products(grad)) * target.spec.launch_seconds
    )


def naive_grad_temp_bytes(spec: AttentionSpec, grad: GradSpec, target: Target) -> int:
    """Returns the size of the probabilities, their gradient and that of the scores.

    The probabilities are kept from the forward pass for the backward pass; a softcap
    keeps its scores as well. A CPU computes them all in `spec.compute_dtype`.
    """
    if target.platform == "cpu":
        buffers = CPU_NAIVE_BUFFERS * spec.compute_dtype.itemsize
        return spec.score_count * buffers
    score, probs = _itemsize(spec.score_dtype), _itemsize(spec.probs_dtype)
    kept = probs + (score if spec.softcap is not None or not spec.named else 0)
    return spec.score_count * (kept + score + probs)


def online_grad_seconds(
    spec: AttentionSpec,
    grad: GradSpec,
    target: Target,
    batch: int,
    kv_heads: int,
    queries: int,
    keys: int,
) -> float:
    """Predicts the time of both halves of "online" in the tiles of its forward."""
    size = batch, kv_heads, queries, keys
    forward = cost.online_seconds(spec, target, *size)
    part, tiles = cost.online_tiles(spec, *size)
    if target.platform == "cpu":
        if _few_rows(spec):
            return forward * CPU_FEW_ROWS
        each = CPU_TILES + (CPU_TILES_MASK if cost.is_modified(spec) else 0.0)
        products = _product_seconds(spec, grad, target, again=True)
        backward = products + each * spec.score_count / cost.cores(target)
        calls = CPU_TILE_CALLS * max(tiles * part, 1)
        return forward + backward * part + cost.CPU_CALL * calls
    # All of it beside the products is traffic and calls, as in the forward half.
    products = _product_seconds(spec, grad, target, again=True)
    rest = forward - cost.matmul_seconds(spec, target) * part / cost.MATMUL_EFFICIENCY
    return forward + products * part / cost.MATMUL_EFFICIENCY + ONLINE_PASSES * rest


def _few_rows(spec: AttentionSpec) -> bool:
    return spec.group * spec.q_len < cost.FEW_ROWS


def _products(grad: GradSpec) -> int:
    """Returns how many products the backward pass takes."""
    return len({"q", "k", "v"} & set(grad.wanted)) + (grad.wanted != ("v",))


def _product_seconds(
    spec: AttentionSpec, grad: GradSpec, target: Target, again: bool
) -> float:
    """Returns the time of the backward pass's products at the peak rate.

    Args:
      spec: the site.
      grad: what is wanted.
      target: where.
      again: whether the scores are computed once more.
    """
    score, value = cost.product_seconds(spec, target)
    scores = len({"q", "k"} & set(grad.wanted)) + again
    values = ("v" in grad.wanted) + (grad.wanted != ("v",))
    return scores * score + values * value


def _itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize
