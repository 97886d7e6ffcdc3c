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

# Seconds of one core a score in the backward half, beside the products [cpu]; more if
# tiles are kept from a first sweep.
CPU_NAIVE = 12.5e-9
CPU_NAIVE_MASK = 1.5e-9
CPU_TILES = 4.7e-9
CPU_TILES_MASK = 1.0e-9
CPU_TILES_KEPT = 8.0e-9
# Calls of the backward half for one tile [cpu].
CPU_TILE_CALLS = 6
# A site of one tile takes much the same time as XLA's own code, 0.87 to 1.05 of it; of
# that in a narrow dtype, which is converted to and fro, 0.57 to 0.77 [cpu].
CPU_ONE_TILE = 0.97
CPU_ONE_TILE_NARROW = 0.8
# Seconds a multiplication in XLA's own loops for a product: 0.3e-9 to 1.2e-9 [cpu].
CPU_SLOW_PRODUCT = 0.5e-9
# Buffers of the scores' size in XLA's own code: 3 to 4 [cpu].
CPU_NAIVE_BUFFERS = 3
# Against one forward pass where the products have few rows. Seen at one size only, one
# query and 2048 keys [cpu]; no training step in practice has such a site.
CPU_FEW_ROWS = 5.0


def naive_grad_seconds(spec: AttentionSpec, grad: GradSpec, target: Target) -> float:
    """Predicts the time of XLA's own code for a site and its backward pass."""
    forward = cost.naive_seconds(spec, target)
    modified = cost.is_modified(spec)
    if target.platform == "cpu":
        if _few_rows(spec):
            return forward * CPU_FEW_ROWS
        seconds = _cpu_naive_seconds(spec, grad, target)
        return seconds + _cpu_slow_product_seconds(spec, grad)
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
    first: tuple[int, int, int, int],
    second: tuple[int, int, int, int],
) -> float:
    """Predicts the time of both halves of "online".

    Args:
      spec: the site.
      grad: what is wanted.
      target: where.
      first: batch, kv_heads, queries and keys of a tile of the forward half.
      second: of the backward half.
    """
    forward = cost.online_seconds(spec, target, *first)
    if target.platform == "cpu":
        if _few_rows(spec):
            return forward * CPU_FEW_ROWS
        if second == (spec.batch, spec.kv_heads, spec.q_len, spec.k_len):
            part = CPU_ONE_TILE
            if _itemsize(spec.score_dtype) < spec.compute_dtype.itemsize:
                part = CPU_ONE_TILE_NARROW
            return part * _cpu_naive_seconds(spec, grad, target)
        return forward + _cpu_tiles_seconds(spec, grad, target, second)
    part, _ = cost.online_tiles(spec, *first)
    # All of it beside the products is traffic and calls, as in the forward half.
    products = _product_seconds(spec, grad, target, again=True)
    rest = forward - cost.matmul_seconds(spec, target) * part / cost.MATMUL_EFFICIENCY
    return forward + products * part / cost.MATMUL_EFFICIENCY + ONLINE_PASSES * rest


def _cpu_naive_seconds(spec: AttentionSpec, grad: GradSpec, target: Target) -> float:
    each = CPU_NAIVE + (CPU_NAIVE_MASK if cost.is_modified(spec) else 0.0)
    products = _product_seconds(spec, grad, target, again=False)
    cores = min(cost.cores(target), cost.CPU_NAIVE_CORES)
    elementwise = each * spec.score_count / cores
    return cost.naive_seconds(spec, target) + products + elementwise


def _cpu_slow_product_seconds(spec: AttentionSpec, grad: GradSpec) -> float:
    """Returns what the product for the gradient of k costs where XLA has no library's.

    That is so in bfloat16 and with batch and head dims; XLA drops those of 1.
    """
    slow = spec.score_dtype == spec.k_dtype == "bfloat16"
    if not slow or "k" not in grad.wanted or min(spec.batch, spec.heads) == 1:
        return 0.0
    return CPU_SLOW_PRODUCT * spec.score_count * spec.head_dim


def _cpu_tiles_seconds(
    spec: AttentionSpec,
    grad: GradSpec,
    target: Target,
    size: tuple[int, int, int, int],
) -> float:
    """Predicts the time of the backward half of "online" on a CPU."""
    queries, keys = size[2:]
    each = CPU_TILES + (CPU_TILES_MASK if cost.is_modified(spec) else 0.0)
    part = 1.0
    if keys < spec.k_len:
        each = CPU_TILES_KEPT
        waste = (queries + keys) // 4 * (2 - spec.band.count(None))
        part = cost.visible_scores(spec, waste) / spec.score_count
    _, tiles = cost.online_tiles(spec, *size)
    products = _product_seconds(spec, grad, target, again=True)
    elementwise = each * spec.score_count / cost.cores(target)
    calls = CPU_TILE_CALLS * max(tiles * part, 1)
    return (products + elementwise) * part + cost.CPU_CALL * calls


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
