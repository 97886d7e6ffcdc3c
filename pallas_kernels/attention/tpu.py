"""The splash attention that ships inside JAX, as an implementation for TPUs.

`jax.experimental.pallas.ops.tpu.splash_attention` never writes the scores to memory,
skips the blocks that a band of visible keys hides, and lets query heads share keys.
It has no scale (queries are scaled here, in float32, then rounded to their dtype)
and no bias. Lengths are padded to whole blocks; padded keys are hidden by segment
ids, padded rows are cut off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
)

from hlo_tools.composites import AttentionSpec, Implementation
from hlo_tools.targets import Target
from pallas_kernels.attention import cost

LANES = 128
# Larger blocks ask for more VMEM than the 16 MiB that v5e gives a kernel by default.
MAX_BLOCK = 512
DTYPES = ("bfloat16", "float32")


class Blocks(NamedTuple):
    """Block sizes and padded lengths.

    Attributes:
      queries, keys: rows and columns of a block.
      q_len, k_len, depth: padded lengths of T, S and of D and Dv.
    """

    queries: int
    keys: int
    q_len: int
    k_len: int
    depth: int


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def choose_blocks(spec: AttentionSpec) -> Blocks:
    """Returns the largest block that pads a length by less than an eighth."""

    def block(length: int) -> int:
        size = MAX_BLOCK
        while size > LANES and _up(length, size) > max(length * 9 // 8, LANES):
            size //= 2
        return size

    queries, keys = block(spec.q_len), block(spec.k_len)
    depth = _up(max(spec.head_dim, spec.value_dim), LANES)
    return Blocks(
        queries, keys, _up(spec.q_len, queries), _up(spec.k_len, keys), depth
    )


def splash_attention(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *sides: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Computes a site with splash attention.

    Args:
      spec: a site that `IMPLEMENTATION` supports.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *sides: not used; supported sites have none that matter.
      interpret: run the kernel without a TPU.

    Returns:
      [B,T,H,Dv] in `spec.out_dtype`.
    """
    blocks = choose_blocks(spec)
    dtype = q.dtype
    q = (q.astype(jnp.float32) * spec.scale).astype(dtype)
    q = _padded(q, blocks.q_len, blocks.depth)  # [B,H,T',D']
    k = _padded(k.astype(dtype), blocks.k_len, blocks.depth)  # [B,K,S',D']
    v = _padded(v.astype(dtype), blocks.k_len, blocks.depth)
    kernel = make_kernel(spec, blocks, interpret)
    segments = None
    if blocks.k_len != spec.k_len:
        hidden = np.arange(blocks.k_len) >= spec.k_len
        segments = splash.SegmentIds(
            jnp.zeros(blocks.q_len, jnp.int32), jnp.asarray(hidden, jnp.int32)
        )
    out = jax.vmap(lambda *qkv: kernel(*qkv, segment_ids=segments))(q, k, v)
    out = jnp.transpose(out, (0, 2, 1, 3))[:, : spec.q_len, :, : spec.value_dim]
    return out.astype(spec.out_dtype)


def make_kernel(spec: AttentionSpec, blocks: Blocks, interpret: bool) -> Callable:
    """Returns the kernel for one batch element."""
    low, high = spec.band
    mask = splash_mask.LocalMask(
        (blocks.q_len, blocks.k_len), (None if low is None else -low, high), offset=0
    )
    if low is None and high is None:
        mask = splash_mask.FullMask((blocks.q_len, blocks.k_len))
    return splash.make_splash_mha(
        splash_mask.MultiHeadMask([mask] * spec.heads),
        block_sizes=splash.BlockSizes(
            block_q=blocks.queries,
            block_kv=blocks.keys,
            block_kv_compute=blocks.keys,
        ),
        attn_logits_soft_cap=spec.softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )


def _padded(array: jax.Array, length: int, depth: int) -> jax.Array:
    """[B,L,N,D] to [B,N,length,depth], filled up with zeros."""
    _, old_length, _, old_depth = array.shape
    pads = ((0, 0), (0, length - old_length), (0, 0), (0, depth - old_depth))
    return jnp.transpose(jnp.pad(array, pads), (0, 2, 1, 3))


def _supports(spec: AttentionSpec, target: Target) -> str | None:
    if not spec.named:
        return "the scores are modified in a way that it has no form for"
    if spec.has_bias or spec.has_mask:
        return "a bias or a mask by data would have to be in memory"
    if not spec.q_dtype == spec.k_dtype == spec.v_dtype:
        return f"q, k, v differ: {spec.q_dtype}, {spec.k_dtype}, {spec.v_dtype}"
    if spec.q_dtype not in DTYPES:
        return f"takes {' and '.join(DTYPES)}, not {spec.q_dtype}"
    if spec.q_dtype == "float32" and set(spec.precision) != {"DEFAULT"}:
        return f"multiplies at default precision; here: {spec.precision}"
    if spec.q_dtype != "float32" and spec.probs_dtype != spec.q_dtype:
        return f"rounds the probabilities to {spec.q_dtype}; here: {spec.probs_dtype}"
    if not spec.masks_are_negligible:
        return f"masked scores are {spec.mask_fill}, not so low as to count nothing"
    if not spec.rows_never_empty and spec.band != (None, None):
        return "some query sees no key"
    if spec.score_count == 0:
        return "an operand is empty"
    if spec.q_len == 1:
        return "one query: the scores are small"
    return None


def _temp_bytes(spec: AttentionSpec, target: Target) -> int:
    """Padded and transposed operands and result."""
    blocks = choose_blocks(spec)
    rows = 2 * spec.heads * blocks.q_len + 2 * spec.kv_heads * blocks.k_len
    return spec.batch * rows * blocks.depth * jnp.dtype(spec.q_dtype).itemsize


def _config(spec: AttentionSpec, target: Target) -> dict[str, Any]:
    blocks = choose_blocks(spec)
    return {"block_q": blocks.queries, "block_kv": blocks.keys, "depth": blocks.depth}


def _seconds(spec: AttentionSpec, target: Target) -> float:
    return cost.tpu_flash_seconds(spec, target)


def _build(spec: AttentionSpec, target: Target) -> Callable:
    return functools.partial(splash_attention, spec)


IMPLEMENTATION = Implementation(
    name="tpu-flash",
    platforms=("tpu",),
    supports=_supports,
    seconds=_seconds,
    temp_bytes=_temp_bytes,
    config=_config,
    build=_build,
)
