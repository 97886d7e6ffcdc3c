"""cuDNN's fused attention, through the custom call that XLA knows it by.

`jax.nn.dot_product_attention(implementation="cudnn")` emits the same call, but looks
for a GPU and for cuDNN on the machine at hand first, and wraps the call in a custom
partitioning whose Python callback does not survive in a module's text. A site must
lower on any machine, so the call is made here, by the public `jax.ffi`.

What the call can say:

- CAUSAL is aligned top left: query i sees keys 0 .. i, also when T != S.
- A sliding window of length n is keys i - n + 1 .. i, and only together with CAUSAL.
- Anything else is a bias [B|1,H|1,T,S], added to the scaled scores.

A mask is such a bias, with a number so low that exp is exactly 0 beside any score.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hlo_tools.composites import (
    AttentionSpec,
    Implementation,
    fix_empty_rows,
    visible_keys,
)
from hlo_tools.targets import Target
from pallas_kernels.attention import cost

# As in jax.nn: exp of it is 0, and the difference of two such scores is finite.
MASKED = -float(2 << 40)
# jax.nn's limits on the head dim.
MAX_HEAD_DIM = 256
MAX_HEAD_DIM_BEFORE_HOPPER = 128
HALF_DTYPES = {"bfloat16": "BF16", "float16": "F16"}


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


def cudnn_attention(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, *sides: jax.Array
) -> jax.Array:
    """Computes a site with cuDNN.

    Args:
      spec: a site that `IMPLEMENTATION` supports.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *sides: [B|1,K|1,G|1,T|1,S|1] each.

    Returns:
      [B,T,H,Dv] in `spec.out_dtype`.
    """
    plan = make_plan(spec)
    bias = scores_bias(spec, plan, sides)
    keys = slice(plan.first, plan.end)
    out = custom_call(
        q, k[:, keys], v[:, keys], bias, spec.scale, plan.causal, plan.window
    )
    if not _averages_empty_rows(spec, plan):
        out = fix_empty_rows(spec, out, v, *sides)
    return out.astype(spec.out_dtype)


def _averages_empty_rows(spec: AttentionSpec, plan: Plan) -> bool:
    """Whether rows without a visible key come out as the site has them.

    They do when all that hides a key is `MASKED` in the bias: a score vanishes
    beside it, which leaves equal scores.
    """
    whole = (plan.first, plan.end) == (0, spec.k_len) and not plan.causal
    return whole and spec.mask_fill is not None and math.isfinite(spec.mask_fill)


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
    dtype = _bias_dtype(spec)
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


def _bias_dtype(spec: AttentionSpec) -> str:
    """bfloat16 where that is exact; cuDNN takes a float32 bias with any operands."""
    exact = not spec.has_bias or spec.bias_dtype == "bfloat16"
    # float16 has no number like MASKED
    return "bfloat16" if exact and spec.q_dtype == "bfloat16" else "float32"


def custom_call(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    scale: float,
    causal: bool,
    window: int,
) -> jax.Array:
    """Calls cuDNN's forward pass.

    Args:
      q: [B,T,H,D] in bfloat16 or float16.
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      bias: [B|1,H|1,T,S], or None.
      scale: factor of the scores.
      causal: top left.
      window: length of the sliding window, or 0.

    Returns:
      [B,T,H,Dv] in the dtype of q.
    """
    b, t, h, _ = q.shape
    config = backend_config(q, k, scale, causal, window)
    call = jax.ffi.ffi_call(
        "__cudnn$fmhaSoftmax" if bias is None else "__cudnn$fmhaScaleBiasSoftmax",
        # The second result is the workspace; XLA finds out its size.
        [
            jax.ShapeDtypeStruct((b, h, t, v.shape[-1]), q.dtype),
            jax.ShapeDtypeStruct((0,), jnp.uint8),
        ],
        # [B,H,T,D] laid out as [B,T,H,D], so that the transpose below is free
        output_layouts=[(0, 2, 1, 3), (0,)],
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(config),
    )
    out, _ = call(q, k, v) if bias is None else call(q, k, v, bias)
    return jnp.transpose(out, (0, 2, 1, 3))


def backend_config(
    q: jax.Array, k: jax.Array, scale: float, causal: bool, window: int
) -> dict[str, Any]:
    """Returns the call's configuration: XLA's GpuBackendConfig proto, as JSON."""
    b, t, h, _ = q.shape
    s = k.shape[1]
    return {
        "operation_queue_id": "0",
        "cudnn_fmha_backend_config": {
            "algorithm": {
                "algo_id": "0",
                "math_type": "TENSOR_OP_MATH",
                "tuning_knobs": {"17": "1", "24": "0"},
                "is_cudnn_frontend": True,
                "workspace_size": "0",
            },
            "fmha_scale": scale,
            "intermediate_tensor_shape": _score_shape(q.dtype, (b, h, t, s)),
            "is_flash_attention": True,
            "mask_type": "CAUSAL" if causal else "NO_MASK",
            # q [B,T,H,D] k [B,S,K,D] -> [B,H,T,S]; that v [B,S,K,D] -> [B,H,T,D]
            "bmm1_dot_dimension_numbers": _dot_numbers(3, 3, (0, 2), (0, 2)),
            "bmm2_dot_dimension_numbers": _dot_numbers(3, 1, (0, 1), (0, 2)),
            "dropout_rate": 0.0,
            "seed": 42,
            "sliding_window_length": window,
            "max_seg_per_batch": 1,
            "is_paged_attention": False,
        },
    }


def _score_shape(dtype: jnp.dtype, shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "element_type": HALF_DTYPES[str(dtype)],
        "dimensions": [str(n) for n in shape],
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }


def _dot_numbers(lhs: int, rhs: int, lhs_batch, rhs_batch) -> dict[str, list[str]]:
    return {
        "lhs_contracting_dimensions": [str(lhs)],
        "rhs_contracting_dimensions": [str(rhs)],
        "lhs_batch_dimensions": [str(i) for i in lhs_batch],
        "rhs_batch_dimensions": [str(i) for i in rhs_batch],
    }


def _supports(spec: AttentionSpec, target: Target) -> str | None:
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


def _seconds(spec: AttentionSpec, target: Target) -> float:
    plan = make_plan(spec)
    has_bias = plan.band_in_bias or spec.has_bias or spec.has_mask
    return cost.cudnn_seconds(spec, target, has_bias)


def _temp_bytes(spec: AttentionSpec, target: Target) -> int:
    """The bias, if any; cuDNN's own workspace is small."""
    plan = make_plan(spec)
    if not (plan.band_in_bias or spec.has_bias or spec.has_mask):
        return 0
    out = jax.eval_shape(lambda *sides: scores_bias(spec, plan, sides), *_sides(spec))
    return out.size * out.dtype.itemsize


def _sides(spec: AttentionSpec) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(side.shape, side.dtype) for side in spec.sides]


def _config(spec: AttentionSpec, target: Target) -> dict[str, Any]:
    plan = make_plan(spec)
    masks = "causal" if plan.causal else "none"
    if plan.band_in_bias or spec.has_bias or spec.has_mask:
        masks = "causal and bias" if plan.causal else "bias"
    return {"mask": masks, "window": plan.window, "keys": plan.end - plan.first}


def _build(spec: AttentionSpec, target: Target) -> Callable:
    return functools.partial(cudnn_attention, spec)


IMPLEMENTATION = Implementation(
    name="cudnn",
    platforms=("gpu",),
    supports=_supports,
    seconds=_seconds,
    temp_bytes=_temp_bytes,
    config=_config,
    build=_build,
)
