"""Predicted times of attention with its backward pass, on GPUs and TPUs.

Rooflines as in cost.py, whose numbers for the forward half are taken. [h200] is one
H200: B2 S8192 H16 D128, B4 S2048 H16 D128 and B4 S4096 H16 D64, in bfloat16.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from hlo_tools.composites import AttentionSpec
from hlo_tools.targets import Target
from pallas_kernels.attention import cost

# Products of the size of a forward product: cuDNN computes the scores again, the
# gradient of the probabilities, and three results. The TPU kernels make the first
# two once for dq and once for dk and dv.
CUDNN_PRODUCTS = 5
TPU_PRODUCTS = 7
# Of the matmul peak, backward half alone, at head dim 128: 0.61 at S = 8192 and 0.52
# at S = 2048; causal times are those of BLOCK_WASTE more keys, as for the forward
# half [h200].
CUDNN_BACKWARD_EFFICIENCY = 0.6


def cudnn_grad_seconds(
    spec: AttentionSpec, target: Target, has_bias: bool, has_dbias: bool
) -> float:
    """Predicts the time of cuDNN's forward and backward pass.

    Args:
      spec: the site.
      target: a GPU.
      has_bias: whether masks or biases are read from memory.
      has_dbias: whether the gradient of a bias is written.
    """
    forward = cost.cudnn_seconds(spec, target, has_bias)
    slowdown = cost.CUDNN_BIAS_SLOWDOWN if has_bias else 1.0
    backward = _backward_seconds(
        spec, target, CUDNN_PRODUCTS, CUDNN_BACKWARD_EFFICIENCY / slowdown
    )
    if has_dbias:
        bandwidth = cost.BANDWIDTH_EFFICIENCY * target.spec.memory_bandwidth
        size = jnp.dtype(spec.q_dtype).itemsize
        backward += cost.PASSES * size * spec.score_count / bandwidth
    return forward + backward


def cudnn_grad_workspace_bytes(spec: AttentionSpec) -> int:
    """Returns the size of cuDNN's workspace: dq in float32, and a sum a row.

    With grouped heads dk and dv of each query head too, before they are summed.
    """
    rows = spec.batch * spec.heads * spec.q_len
    total = 4 * rows * (spec.head_dim + 1)
    if spec.group > 1:
        keys = spec.batch * spec.heads * spec.k_len
        size = jnp.dtype(spec.q_dtype).itemsize
        total += keys * (spec.head_dim + spec.value_dim) * size
    return total


def tpu_grad_seconds(spec: AttentionSpec, target: Target, has_bias: bool) -> float:
    """Predicts the time of the TPU kernels, forward and backward.

    Args:
      spec: the site.
      target: a TPU.
      has_bias: whether masks or biases are read from memory.
    """
    forward = cost.tpu_seconds(spec, target, has_bias)
    slowdown = cost.TPU_BIAS_SLOWDOWN if has_bias else 1.0
    efficiency = cost.TPU_EFFICIENCY / slowdown
    return forward + _backward_seconds(spec, target, TPU_PRODUCTS, efficiency)


def _backward_seconds(
    spec: AttentionSpec, target: Target, products: int, efficiency: float
) -> float:
    """Arithmetic at a part of the peak, or the operands once for each half.

    Args:
      spec: the site.
      target: the device.
      products: how many of the size of one of the two forward products.
      efficiency: of the matmul peak, at head dim 128 and above.
    """
    depth = max(spec.head_dim, spec.value_dim)
    efficiency *= math.sqrt(min(depth, 128) / 128)
    part = cost.visible_scores(spec, cost.BLOCK_WASTE) / spec.score_count
    rows = max(128 / spec.q_len, 1.0)  # a block has that many
    forward = cost.matmul_seconds(spec, target)
    arithmetic = forward * products / 2 * part * rows / efficiency
    # q, k, v, out and dout in, dq, dk and dv out
    bandwidth = cost.BANDWIDTH_EFFICIENCY * target.spec.memory_bandwidth
    stream = 2 * cost.operand_bytes(spec) / bandwidth
    return max(arithmetic, stream) + target.spec.launch_seconds
