"""Attention by online softmax in plain JAX, for any scores on any device.

On a CPU this is faster than the scores in memory, since a tile stays in the cache
and blocks that a causal mask or window hides are skipped. Elsewhere it saves memory.
online_forward.py holds the loops, rows.py the form for what XLA's CPU compiler
fuses, online_backward.py the backward half.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from hlo_tools.composites import AttentionSpec, Implementation
from hlo_tools.targets import Target
from pallas_kernels.attention import cost, online_grad, rows
from pallas_kernels.attention.online_forward import online_attention
from pallas_kernels.attention.online_tiling import choose_blocks, product_dtypes


def _supports(spec: AttentionSpec, target: Target) -> str | None:
    if math.prod((spec.score_count, spec.head_dim, spec.value_dim)) == 0:
        return "an operand is empty"
    return None


def _by_rows(spec: AttentionSpec, target: Target) -> bool:
    return target.platform == "cpu" and rows.suits(spec)


def _config(spec: AttentionSpec, target: Target) -> dict[str, Any]:
    if _by_rows(spec, target):
        return {"form": "rows", **rows.choose_blocks(spec)._asdict()}
    return {"form": "tiles", **choose_blocks(spec, target)._asdict()}


def _temp_bytes(spec: AttentionSpec, target: Target) -> int:
    """Transposed (on a CPU also widened) k and v, and about three tiles."""
    if _by_rows(spec, target):
        return rows.temp_bytes(spec, rows.choose_blocks(spec))
    tile = math.prod(choose_blocks(spec, target)) * spec.group
    operand = product_dtypes(spec, target.platform == "cpu")[0].itemsize
    keys = spec.batch * spec.k_len * spec.kv_heads * (spec.head_dim + spec.value_dim)
    return keys * operand + 3 * tile * spec.compute_dtype.itemsize


def _seconds(spec: AttentionSpec, target: Target) -> float:
    if _by_rows(spec, target):
        return cost.rows_seconds(spec, target, *rows.choose_blocks(spec))
    return cost.online_seconds(spec, target, *choose_blocks(spec, target))


def _build(spec: AttentionSpec, target: Target) -> Callable:
    if _by_rows(spec, target):
        return functools.partial(rows.row_attention, spec, rows.choose_blocks(spec))
    blocks = choose_blocks(spec, target)
    return functools.partial(online_attention, spec, blocks, target.platform == "cpu")


IMPLEMENTATION = Implementation(
    name="online",
    platforms=("cpu", "gpu", "tpu"),
    supports=_supports,
    seconds=_seconds,
    temp_bytes=_temp_bytes,
    config=_config,
    build=_build,
    grad=online_grad.GRAD,
)
