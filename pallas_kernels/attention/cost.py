"""Predicted times of attention: XLA's own code and each implementation.

Rooflines over the numbers of `hlo_tools.targets`: products at a part of the peak,
bytes at a part of the bandwidth, a constant for each call. The parts were measured;
each says where. What has to be right is which of two is faster, not by how much.

Measured on two quiet cores and one H200: [cpu] benchmarks/online_attention_cpu.py,
[h200] benchmarks/attention_gpu.py; the figures are in benchmarks/results/.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from hlo_tools.composites import AttentionSpec
from hlo_tools.targets import DeviceSpec, Target

# --- GPU and TPU -----------------------------------------------------------------
# Of the peak: plain products reach 790 to 820 of 989 TFLOP/s, streams 4.3 of 4.8
# TB/s on an H200 [h200]; taken for TPUs too.
MATMUL_EFFICIENCY = 0.8
BANDWIDTH_EFFICIENCY = 0.9
# XLA writes and reads the scores and the probabilities once each; with masks or
# other changes also the modified scores, in the softmax dtype. Fits [h200] within
# 12% at S of 2048 to 8192, bfloat16 and float32.
PASSES = 2
# A product of a matrix and a few vectors leaves most of the bandwidth unused: 1.2
# TB/s of 4.8 with 4 queries a key [h200].
FEW_ROWS, FEW_ROWS_EFFICIENCY = 16, 0.4
# The tiles of "online" go through memory several times: these bytes a score beside
# the probabilities, and the accumulator once for each key block [h200].
ONLINE_BYTES = 18
ONLINE_ACCUMULATOR_BYTES = 12
ONLINE_CALLS = 8  # kernels a tile

# --- cuDNN and TPU kernels ---------------------------------------------------------
# Of the matmul peak at head dim 128 and above; less as the root below [h200]:
# 0.70 at 128 and 0.485 at 64.
CUDNN_EFFICIENCY = 0.70
# A bias is read for each score: 0.46 ms at S = 2048 if all heads share it, 0.63 ms
# if not, against 0.22 ms without [h200].
CUDNN_BIAS_SLOWDOWN = 2.5
# Blocks that a mask cuts are computed whole, and fill the GPU unevenly: causal times
# at S of 2048 to 8192 [h200] are those of this many more keys a query.
BLOCK_WASTE = 384
# tokamax's tuned kernels reach 0.3 to 0.4 of the peak at head dim 128 on v6e and
# TPU7x (its data/autotuning tables); the kernels inside JAX are not tuned.
TPU_EFFICIENCY = 0.3
TPU_BIAS_SLOWDOWN = 1.5

# --- CPU ---------------------------------------------------------------------------
# Seconds of one core a score, beside the products [cpu].
CPU_NAIVE = 1.5e-9
CPU_NAIVE_MASK = 1.5e-9
CPU_NAIVE_UNCACHED = 4.5e-9  # more, once the scores leave the caches
CPU_CACHE_BYTES = 4 << 20
CPU_ROWS = 1.5e-9
CPU_ROWS_MASK = 0.7e-9
CPU_TILES = 2.5e-9
CPU_TILES_MASK = 0.7e-9
# Elementwise work of XLA's own code stops gaining with more cores [cpu].
CPU_NAIVE_CORES = 4
CPU_CORE_FLOPS = 100e9  # as in targets.py
CPU_CALL = 25e-6  # one block of either form
# Decoding is reading k and v, a few times over because of their layout; repeating
# them for groups of queries costs more. XLA's own code was 1.0 to 2.3 times slower.
CPU_KV_PASSES = 3.0
CPU_KV_PASSES_NAIVE = 3.3
CPU_KV_PASSES_GROUPED = 4.5


def naive_seconds(spec: AttentionSpec, target: Target) -> float:
    """Predicts the time of XLA's own code for a site."""
    if target.platform == "cpu":
        return _cpu_naive_seconds(spec, target)
    itemsize = _itemsize(spec.score_dtype) + _itemsize(spec.probs_dtype)
    if is_modified(spec):
        itemsize += _itemsize(spec.softmax_dtype)
    traffic = PASSES * itemsize * spec.score_count
    bandwidth = BANDWIDTH_EFFICIENCY * target.spec.memory_bandwidth
    calls = 3 * target.spec.launch_seconds
    return _product_seconds(spec, target) + traffic / bandwidth + calls


def _product_seconds(spec: AttentionSpec, target: Target) -> float:
    """XLA's own products on a GPU or TPU, bound by arithmetic or by operands."""
    few_rows = spec.group * spec.q_len < FEW_ROWS
    efficiency = FEW_ROWS_EFFICIENCY if few_rows else BANDWIDTH_EFFICIENCY
    stream = operand_bytes(spec) / (efficiency * target.spec.memory_bandwidth)
    return max(matmul_seconds(spec, target) / MATMUL_EFFICIENCY, stream)


def naive_temp_bytes(spec: AttentionSpec, target: Target) -> int:
    """Returns the size of the scores and the probabilities, as XLA keeps them.

    On a CPU one takes the place of the other [cpu].
    """
    sizes = _itemsize(spec.score_dtype), _itemsize(spec.probs_dtype)
    itemsize = max(sizes) if target.platform == "cpu" else sum(sizes)
    return spec.score_count * itemsize


def online_seconds(
    spec: AttentionSpec,
    target: Target,
    batch: int,
    kv_heads: int,
    queries: int,
    keys: int,
) -> float:
    """Predicts the time of "online" in tiles of [batch,kv_heads,G,queries,keys]."""
    part, tiles = online_tiles(spec, batch, kv_heads, queries, keys)
    if target.platform == "cpu":
        mask = CPU_TILES_MASK if is_modified(spec) else 0.0
        seconds = _cpu_seconds(spec, target, CPU_TILES + mask, part)
        return seconds + CPU_CALL * max(tiles * part, 1)
    itemsize = ONLINE_BYTES + PASSES * _itemsize(spec.probs_dtype)
    itemsize += ONLINE_ACCUMULATOR_BYTES * spec.value_dim / keys
    bandwidth = BANDWIDTH_EFFICIENCY * target.spec.memory_bandwidth
    seconds = _product_seconds(spec, target) + itemsize * spec.score_count / bandwidth
    calls = ONLINE_CALLS * target.spec.launch_seconds * tiles
    return (seconds + calls) * part


def online_tiles(
    spec: AttentionSpec, batch: int, kv_heads: int, queries: int, keys: int
) -> tuple[float, int]:
    """Returns the part of the scores that "online" computes, of how many tiles."""
    tiles = -(-spec.q_len // queries) * -(-spec.k_len // keys)
    tiles *= spec.batch // batch * (spec.kv_heads // kv_heads)
    # Each limit cuts a tile in two somewhere, half of which is wasted.
    waste = (queries + keys) // 2 * (2 - spec.band.count(None))
    return visible_scores(spec, waste) / spec.score_count, tiles


def rows_seconds(
    spec: AttentionSpec,
    target: Target,
    batch: int,
    kv_heads: int,
    queries: int,
    groups: int,
) -> float:
    """Predicts the time of "online" on a CPU by whole rows, see rows.py."""
    low, high = spec.band
    part = (groups + 1) / (2 * groups) if groups > 1 else 1.0
    if low is not None and high is not None:
        part = min(1.0, (queries + high - low) / spec.k_len)
    blocks = -(-spec.q_len // queries)
    blocks *= spec.batch // batch * (spec.kv_heads // kv_heads)
    mask = CPU_ROWS_MASK if is_modified(spec) else 0.0
    seconds = _cpu_seconds(spec, target, CPU_ROWS + mask, part)
    return seconds + CPU_CALL * (1 + blocks)


def cudnn_seconds(spec: AttentionSpec, target: Target, has_bias: bool) -> float:
    """Predicts the time of cuDNN's kernel.

    Args:
      spec: the site.
      target: a GPU.
      has_bias: whether masks or biases are read from memory.
    """
    slowdown = CUDNN_BIAS_SLOWDOWN if has_bias else 1.0
    return _kernel_seconds(spec, target, CUDNN_EFFICIENCY, slowdown)


def tpu_seconds(spec: AttentionSpec, target: Target, has_bias: bool) -> float:
    """Predicts the time of the TPU kernels, as `cudnn_seconds` does."""
    slowdown = TPU_BIAS_SLOWDOWN if has_bias else 1.0
    return _kernel_seconds(spec, target, TPU_EFFICIENCY, slowdown)


def _kernel_seconds(
    spec: AttentionSpec, target: Target, efficiency: float, slowdown: float
) -> float:
    depth = max(spec.head_dim, spec.value_dim)
    efficiency *= math.sqrt(min(depth, 128) / 128)
    part = visible_scores(spec, BLOCK_WASTE) / spec.score_count
    # Rows of a block that the site does not have are computed too.
    rows = max(128 / spec.q_len, 1.0)
    products = matmul_seconds(spec, target) * part * rows * slowdown / efficiency
    bandwidth = BANDWIDTH_EFFICIENCY * target.spec.memory_bandwidth
    stream = operand_bytes(spec) / bandwidth
    if spec.group * spec.q_len < FEW_ROWS:  # its decoding reads k and v only
        products = 0.0
    return max(products, stream) + target.spec.launch_seconds


def matmul_seconds(spec: AttentionSpec, target: Target) -> float:
    """Returns the time of both products at the peak rate."""
    return sum(product_seconds(spec, target))


def product_seconds(spec: AttentionSpec, target: Target) -> tuple[float, float]:
    """Returns the times of the score and the value product at the peak rate."""
    device = target.spec
    score = 2 * spec.score_count * spec.head_dim
    value = 2 * spec.score_count * spec.value_dim
    score_dtype = str(jnp.promote_types(spec.q_dtype, spec.k_dtype))
    value_dtype = str(jnp.promote_types(spec.probs_dtype, spec.v_dtype))
    return (
        score / _rate(device, score_dtype, spec.precision[0]),
        value / _rate(device, value_dtype, spec.precision[1]),
    )


def _rate(device: DeviceSpec, dtype: str, precision: str) -> float:
    rates = device.matmul_flops
    if dtype == "float32" and "tf32" in rates:
        if precision == "DEFAULT":
            return rates["tf32"]
        if precision == "HIGH":
            return max(rates["tf32"] / 3, rates["float32"])
    # A dtype without a row is computed in float32, at best.
    return rates.get(dtype, rates["float32"])


def operand_bytes(spec: AttentionSpec) -> int:
    """Returns the size of q, k, v and the result."""
    keys = spec.batch * spec.k_len * spec.kv_heads
    queries = spec.batch * spec.q_len * spec.heads
    return (
        keys * spec.head_dim * _itemsize(spec.k_dtype)
        + keys * spec.value_dim * _itemsize(spec.v_dtype)
        + queries * spec.head_dim * _itemsize(spec.q_dtype)
        + queries * spec.value_dim * _itemsize(spec.out_dtype)
    )


def visible_scores(spec: AttentionSpec, waste: int) -> float:
    """Returns how many scores a kernel computes that skips hidden blocks.

    Args:
      spec: the site.
      waste: keys a query that are computed beside the visible ones.
    """
    low, high = spec.band
    if low is None and high is None:
        return float(spec.score_count)
    queries = np.arange(spec.q_len)
    first, last = np.zeros_like(queries), np.full_like(queries, spec.k_len - 1)
    if low is not None:
        first = np.maximum(queries + low, 0)
    if high is not None:
        last = np.minimum(queries + high, spec.k_len - 1)
    keys = np.minimum(np.maximum(last - first + 1, 0) + waste, spec.k_len)
    return float(keys.sum()) * spec.batch * spec.heads


def is_modified(spec: AttentionSpec) -> bool:
    """Whether more than a scale stands between score product and softmax."""
    return (
        not spec.named
        or spec.band != (None, None)
        or spec.has_bias
        or spec.has_mask
        or spec.softcap is not None
    )


def _cpu_naive_seconds(spec: AttentionSpec, target: Target) -> float:
    if spec.group * spec.q_len < FEW_ROWS:
        grouped = spec.group > 1
        passes = CPU_KV_PASSES_GROUPED if grouped else CPU_KV_PASSES_NAIVE
        return _cpu_stream_seconds(spec, target, passes)
    scores = spec.score_count * spec.compute_dtype.itemsize
    each = CPU_NAIVE + CPU_NAIVE_UNCACHED * min(scores / CPU_CACHE_BYTES, 1.0)
    each += CPU_NAIVE_MASK if is_modified(spec) else 0.0
    elementwise = each * spec.score_count / min(cores(target), CPU_NAIVE_CORES)
    return matmul_seconds(spec, target) + elementwise + CPU_CALL


def _cpu_seconds(
    spec: AttentionSpec, target: Target, each: float, part: float
) -> float:
    """Products and elementwise work on a part of the scores."""
    if spec.group * spec.q_len < FEW_ROWS:
        return _cpu_stream_seconds(spec, target, CPU_KV_PASSES) + CPU_CALL
    elementwise = each * spec.score_count / cores(target)
    return (matmul_seconds(spec, target) + elementwise) * part


def _cpu_stream_seconds(spec: AttentionSpec, target: Target, passes: float) -> float:
    return operand_bytes(spec) * passes / target.spec.memory_bandwidth


def cores(target: Target) -> float:
    """Returns how many CPU cores the numbers of a target stand for."""
    return max(target.spec.matmul_flops["float32"] / CPU_CORE_FLOPS, 1.0)


def _itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize
