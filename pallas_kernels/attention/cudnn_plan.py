"""What cuDNN's fused attention can compute, and how a site is put to it.

- CAUSAL is aligned top left: query i sees keys 0 .. i, also when T != S.
- A sliding window of length n is keys i - n + 1 .. i, and only together with CAUSAL.
- Anything else is a bias [B|1,H|1,T,S], added to the scaled scores.

A mask is such a bias, with a number so low that exp is exactly 0 beside any score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from hlo_tools.composites import AttentionSpec, visible_keys
from hlo_tools.targets import Target
from pallas_kernels.attention import cost
from pallas_kernels.attention.cudnn_calls import HALF_DTYPES

# As in jax.nn: exp of it is 0, and the difference of two such scores is finite.
MASKED = -float(2 << 40)
# jax.nn's limits on the head dim.
MAX_HEAD_DIM = 256
MAX_HEAD_DIM_BEFORE_HOPPER = 128


@dataclass(frozen=True)
class Plan:
    """How a named site is put to cuDNN.

    Attributes:
      first, end: the keys that are kept; no query sees the others.
      causal: whether cuDNN's own causal mask is used.
      window: length of its sliding window, or 0.
      band_in_bias: the causal and window limits go into the bias instead.
    """

    first: int
    end: int
    causal: bool = False
    window: int = 0
    band_in_bias: bool = False


def make_plan(spec: AttentionSpec) -> Plan:
    """Returns how a named site, some query of which sees a key, is put to cuDNN."""
    low, high = spec.band
    first = 0 if low is None else max(low, 0)
    end = spec.k_len if high is None else min(spec.q_len + high, spec.k_len)
    # Among the keys that are left, does a limit still hide one from some query?
    hides_left = low is not None and spec.q_len - 1 + low > first
    if not hides_left and (high is None or high >= end - 1):
        return Plan(first, end)
    # Then nothing is cut off: that would copy k and v.
    hides_left = low is not None and spec.q_len - 1 + low > 0
    window = 1 - low if low is not None and hides_left else 0
    # cuDNN has no sliding window beside a bias, nor for more queries than keys.
    biased = spec.has_bias or spec.has_mask
    if high != 0 or (hides_left and (biased or spec.q_len > spec.k_len)):
        return Plan(0, spec.k_len, band_in_bias=True)
    return Plan(0, spec.k_len, causal=True, window=window)


def scores_bias(
    spec: AttentionSpec, plan: Plan, sides: tuple[jax.Array, ...]
) -> jax.Array | None:
    """Returns all that is added to the scaled scores, or None.

    Args:
      spec: the site.
      plan: says whether the band is a part.
      sides: whole.

    Returns:
      [B|1,H|1,T,S'], S' the keys that the plan keeps.
    """
    q_pos = jnp.arange(spec.q_len, dtype=jnp.int32)
    k_pos = jnp.arange(spec.k_len, dtype=jnp.int32)
    keep = visible_keys(spec, q_pos, k_pos) if plan.band_in_bias else None
    if spec.has_mask:
        mask = spec.mask_fn(sides, q_pos, k_pos)
        keep = mask if keep is None else keep & mask
    bias = spec.bias_fn(sides, q_pos, k_pos) if spec.has_bias else None
    if keep is None and bias is None:
        return None
    dtype = bias_dtype(spec)
    bias = jnp.zeros((), dtype) if bias is None else bias.astype(dtype)
    if keep is not None:
        bias = jnp.where(keep, bias, jnp.asarray(MASKED, dtype))
    bias = bias.reshape((1,) * (5 - bias.ndim) + bias.shape)
    b, kv_heads, group = bias.shape[:3]
    if kv_heads * group > 1:  # cuDNN broadcasts over no heads or over all
        kv_heads, group = spec.kv_heads, spec.group
    shape = (b, kv_heads, group, spec.q_len, spec.k_len)
    bias = jnp.broadcast_to(bias, shape)[..., plan.first : plan.end]
    return bias.reshape(b, kv_heads * group, spec.q_len, plan.end - plan.first)


def bias_dtype(spec: AttentionSpec) -> str:
    """bfloat16 where that is exact; cuDNN takes a float32 bias with any operands."""
    exact = not spec.has_bias or spec.bias_dtype == "bfloat16"
    # float16 has no number like MASKED
    return "bfloat16" if exact and spec.q_dtype == "bfloat16" else "float32"


def has_bias(spec: AttentionSpec, plan: Plan) -> bool:
    """Whether anything is added to the scaled scores."""
    return plan.band_in_bias or spec.has_bias or spec.has_mask


def bias_bytes(spec: AttentionSpec, plan: Plan) -> int:
    """Returns the size of what `scores_bias` returns."""
    if not has_bias(spec, plan):
        return 0
    sides = [jax.ShapeDtypeStruct(side.shape, side.dtype) for side in spec.sides]
    out = jax.eval_shape(lambda *sides: scores_bias(spec, plan, sides), *sides)
    return out.size * out.dtype.itemsize


def averages_empty_rows(spec: AttentionSpec, plan: Plan) -> bool:
    """Whether rows without a visible key come out as the site has them.

    They do when all that hides a key is `MASKED` in the bias: a score vanishes
    beside it, which leaves equal scores.
    """
    whole = (plan.first, plan.end) == (0, spec.k_len) and not plan.causal
    return whole and spec.mask_fill is not None and math.isfinite(spec.mask_fill)


def unsupported(spec: AttentionSpec, target: Target) -> str | None:
    """Returns why cuDNN can not compute a site, or None if it can."""
    if not target.device_kind.startswith("NVIDIA"):
        return f"cuDNN runs on NVIDIA GPUs, not on {target.device_kind}"
    if _capability(target) < 8:
        return f"it needs compute capability 8.0, not {_capability(target)}"
    return _unsupported_dtypes(spec) or _unsupported_form(spec, target)


def _capability(target: Target) -> float:
    """Returns the compute capability, of the device itself where it is known."""
    device = target.devices[0] if target.devices else None
    known = getattr(device, "compute_capability", None)
    if known is not None:
        return float(known)
    return 8.0 if target.note or target.spec.name.startswith("a100") else 9.0


def _unsupported_dtypes(spec: AttentionSpec) -> str | None:
    if not spec.q_dtype == spec.k_dtype == spec.v_dtype:
        return f"q, k, v differ: {spec.q_dtype}, {spec.k_dtype}, {spec.v_dtype}"
    if spec.q_dtype not in HALF_DTYPES:
        return f"takes bfloat16 and float16, not {spec.q_dtype}"
    if spec.probs_dtype not in HALF_DTYPES:
        return f"rounds the probabilities to {spec.q_dtype}; here: {spec.probs_dtype}"
    if spec.out_dtype not in HALF_DTYPES:
        return f"rounds the result to {spec.q_dtype}; here: {spec.out_dtype}"
    return None


def _unsupported_form(spec: AttentionSpec, target: Target) -> str | None:
    if not spec.named:
        return "the scores are modified in a way that it has no form for"
    if spec.softcap is not None:
        return "it has no softcap"
    if spec.has_bias and spec.bias_dtype == "float64":
        return "would round the float64 bias to float32"
    hopper = _capability(target) >= 9
    limit = MAX_HEAD_DIM if hopper else MAX_HEAD_DIM_BEFORE_HOPPER
    for name, dim in (("head dim", spec.head_dim), ("value dim", spec.value_dim)):
        if dim > limit or dim % 8:
            return f"{name} {dim}: at most {limit} and a multiple of 8"
    if spec.value_dim != spec.head_dim and not hopper:
        return "a value dim that is not the head dim needs Hopper or later"
    if not spec.masks_are_negligible:
        return f"masked scores are {spec.mask_fill}, not so low as to count nothing"
    if spec.score_count == 0 or cost.visible_scores(spec, 0) == 0:
        return "no query sees a key"
    return None
