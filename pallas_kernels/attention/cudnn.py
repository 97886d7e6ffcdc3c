"""cuDNN's fused attention, through the custom call that XLA knows it by.

| file | what it holds |
|---|---|
| cudnn_plan.py | what cuDNN can say, and how a site is put to it |
| cudnn_calls.py | the custom calls |
| cudnn_grad.py | the site together with its backward pass |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from hlo_tools.composites import AttentionSpec, Implementation, fix_empty_rows
from hlo_tools.targets import Target
from pallas_kernels.attention import cost
from pallas_kernels.attention.cudnn_calls import custom_call
from pallas_kernels.attention.cudnn_grad import GRAD
from pallas_kernels.attention.cudnn_plan import (
    averages_empty_rows,
    bias_bytes,
    has_bias,
    make_plan,
    scores_bias,
    unsupported,
)


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
    if not averages_empty_rows(spec, plan):
        out = fix_empty_rows(spec, out, v, *sides)
    return out.astype(spec.out_dtype)


def _seconds(spec: AttentionSpec, target: Target) -> float:
    return cost.cudnn_seconds(spec, target, has_bias(spec, make_plan(spec)))


def _temp_bytes(spec: AttentionSpec, target: Target) -> int:
    """The bias, if any; cuDNN's own workspace is small."""
    return bias_bytes(spec, make_plan(spec))


def _config(spec: AttentionSpec, target: Target) -> dict[str, Any]:
    plan = make_plan(spec)
    masks = "causal" if plan.causal else "none"
    if has_bias(spec, plan):
        masks = "causal and bias" if plan.causal else "bias"
    return {"mask": masks, "window": plan.window, "keys": plan.end - plan.first}


def _build(spec: AttentionSpec, target: Target) -> Callable:
    return functools.partial(cudnn_attention, spec)


IMPLEMENTATION = Implementation(
    name="cudnn",
    platforms=("gpu",),
    supports=unsupported,
    seconds=_seconds,
    temp_bytes=_temp_bytes,
    config=_config,
    build=_build,
    grad=GRAD,
)
