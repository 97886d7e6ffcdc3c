"""Predicted times and memory of the Pallas kernels for Hopper GPUs.

What matters is which of them and cuDNN is faster, so their times are cuDNN's as
cost.py and cost_accelerators_grad.py predict them, divided by the tables below.

[h200] one H200, bfloat16: ratios of times, cuDNN's over ours, at B2 S4096 H16 D128
where a row says nothing else. Estimated, not measured: head dim 256 with its backward
pass, grouped heads in the forward pass, biases of keys, several factors at once,
softcaps, and few rows.
"""

from __future__ import annotations

import math

from hlo_tools.composites import AttentionSpec
from hlo_tools.targets import Target
from pallas_kernels.attention import cost
from pallas_kernels.attention.cost_accelerators_grad import cudnn_grad_seconds
from pallas_kernels.attention.problem import AttentionProblem

# Each pair: of the forward pass alone, of both halves.
Speed = tuple[float, float]

# Whole columns that the kernels compute -> without a band, with one [h200].
DEPTHS: dict[int, tuple[Speed, Speed]] = {
    64: ((1.04, 1.095), (0.925, 1.00)),
    128: ((1.00, 0.976), (1.02, 0.971)),
    256: ((0.99, 0.99), (1.04, 1.00)),
}
# Powers of the part of these columns that the site has: 0.76 and 0.86 at D96 [h200].
PADDED: Speed = (1.0, 0.45)
# What changes it, of sites that have more [h200].
FACTORS: dict[str, Speed] = {
    "window": (0.90, 0.92),
    "mask": (1.13, 1.35),
    "mask of keys": (1.67, 1.89),
    "bias": (1.07, 1.22),
    "gradient of a bias": (1.00, 0.71),
    "grouped": (1.00, 0.81),
    "softcap": (0.65, 0.75),
    "few rows": (0.50, 0.50),
}
FORWARD, BOTH = 0, 1
# Columns of the kernels come in multiples of this.
COLUMNS = 64


def seconds(spec: AttentionSpec, problem: AttentionProblem, target: Target) -> float:
    """Predicts the time of the forward pass alone.

    Args:
      spec: the site.
      problem: as the kernels get it.
      target: a Hopper GPU.
    """
    has_bias = spec.has_bias or spec.has_mask
    speed = _speed(spec, problem, FORWARD, False)
    return cost.cudnn_seconds(spec, target, has_bias) / speed


def grad_seconds(
    spec: AttentionSpec, problem: AttentionProblem, target: Target, wants_bias: bool
) -> float:
    """Predicts the time of both halves.

    Args:
      spec: the site.
      problem: as the kernels get it.
      target: a Hopper GPU.
      wants_bias: whether the gradient of the bias is computed.
    """
    has_bias = spec.has_bias or spec.has_mask
    speed = _speed(spec, problem, BOTH, wants_bias)
    return cudnn_grad_seconds(spec, target, has_bias, wants_bias) / speed


def _speed(
    spec: AttentionSpec, problem: AttentionProblem, half: int, wants_bias: bool
) -> float:
    depth = max(spec.head_dim, spec.value_dim)
    whole = -(-depth // COLUMNS) * COLUMNS
    rows = next(DEPTHS[n] for n in sorted(DEPTHS) if whole <= n or n == max(DEPTHS))
    low, high = problem.band
    speed = rows[(low, high) != (None, None)][half]
    speed *= (depth / whole) ** PADDED[half]
    found = {
        "window": low is not None,
        "gradient of a bias": wants_bias,
        "grouped": spec.group > 1,
        "softcap": spec.softcap is not None,
        "few rows": spec.group * spec.q_len < cost.FEW_ROWS,
    }
    speed *= math.prod(FACTORS[name][half] for name, here in found.items() if here)
    # cuDNN reads masks and biases as one; the larger array decides about ours.
    sides = [
        FACTORS["mask of keys" if 1 in shape[2:] else name][half]
        for name, shape in (("mask", problem.mask), ("bias", problem.bias))
        if shape is not None
    ]
    return speed * min(sides, default=1.0)


def temp_bytes(problem: AttentionProblem) -> int:
    """Returns the size of masks, biases, row sums and padded operands."""
    rows = problem.batch * problem.heads * problem.q_len
    keys = problem.batch * problem.kv_heads * problem.k_len
    own = (problem.head_dim, problem.value_dim)
    whole = [-(-depth // COLUMNS) * COLUMNS for depth in own]
    total = 4 * rows + _side_bytes(problem)
    if list(own) != whole:
        total += 2 * (rows + keys) * sum(whole)  # q, k, v and the result
    return total


def grad_temp_bytes(problem: AttentionProblem, wants_bias: bool) -> int:
    """Returns the same of both halves, with the float32 sums of dq and of a bias."""
    rows = problem.batch * problem.heads * problem.q_len
    depth = -(-problem.head_dim // COLUMNS) * COLUMNS
    total = temp_bytes(problem) + 4 * rows * (depth + 1)
    if wants_bias and problem.bias is not None:
        scores = problem.q_len * problem.k_len
        total += 4 * math.prod(problem.bias[:2]) * scores
    return total


def _side_bytes(problem: AttentionProblem) -> int:
    """A byte an element of the mask, and the bias in its own dtype."""
    total = 0 if problem.mask is None else math.prod(problem.mask)
    if problem.bias is not None:
        size = 4 if problem.bias_dtype == "float32" else 2
        total += size * math.prod(problem.bias)
    return total
