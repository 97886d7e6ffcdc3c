"""Attention together with its backward pass by "online" tiles, on any device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from hlo_tools.composites import AttentionSpec
from hlo_tools.gradients import GradImplementation, GradSpec
from hlo_tools.targets import Target
from pallas_kernels.attention import cost_grad
from pallas_kernels.attention.online_backward import online_attention_grads
from pallas_kernels.attention.online_forward import online_attention_stats
from pallas_kernels.attention.online_tiling import (
    choose_grad_blocks,
    product_dtypes,
)


def _supports(spec: AttentionSpec, grad: GradSpec, target: Target) -> str | None:
    if math.prod((spec.score_count, spec.head_dim, spec.value_dim)) == 0:
        return "an operand is empty"
    return None


def _seconds(spec: AttentionSpec, grad: GradSpec, target: Target) -> float:
    blocks = choose_grad_blocks(spec, target)
    return cost_grad.online_grad_seconds(spec, grad, target, *blocks)


def _build(
    spec: AttentionSpec, grad: GradSpec, target: Target
) -> tuple[Callable, Callable]:
    # What a sweep keeps would be in main memory elsewhere.
    widen = sweep = target.platform == "cpu"
    first, second = choose_grad_blocks(spec, target)
    return (
        functools.partial(online_attention_stats, spec, first, widen),
        functools.partial(online_attention_grads, spec, grad, second, widen, sweep),
    )


def _temp_bytes(spec: AttentionSpec, grad: GradSpec, target: Target) -> int:
    """Transposed k and v, the sums of the gradients, about four tiles, and those kept.

    A softcap, or a function of the scores, has the scores kept too.
    """
    wide = spec.compute_dtype.itemsize
    blocks = choose_grad_blocks(spec, target)[1]
    tile = math.prod(blocks) * spec.group
    kept = 0
    if target.platform == "cpu" and blocks.keys < spec.k_len:
        each = 2 if spec.named and spec.softcap is None else 3
        kept = each * math.prod(blocks[:3]) * spec.group * spec.k_len
    keys = spec.batch * spec.k_len * spec.kv_heads
    of_keys = keys * (spec.head_dim + spec.value_dim)
    operand = product_dtypes(spec, target.platform == "cpu")[0].itemsize
    sums = {"k": keys * spec.head_dim, "v": keys * spec.value_dim}
    sums |= {number: math.prod(spec.sides[number].shape) for number in grad.sides}
    summed = sum(sums.get(name, 0) for name in grad.wanted)
    return of_keys * operand + (summed + 4 * tile + kept) * wide


GRAD = GradImplementation(
    supports=_supports, seconds=_seconds, temp_bytes=_temp_bytes, build=_build
)
