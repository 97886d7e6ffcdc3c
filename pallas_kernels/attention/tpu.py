"""The attention kernels for TPUs that ship inside JAX: splash and flash attention.

| | splash | flash |
|---|---|---|
| causal, window, offset | any, known when it is built | causal with offset 0 |
| softcap | yes | no |
| grouped heads | yes | k and v repeated |
| Dv != D | yes | padded |
| masks and biases | of keys only | of keys; anything else as a whole [B,H,T,S] |
| scale | multiplied into q first | on the scores, exact |

Splash is taken where it is exact. Sizes are padded: T and S to whole blocks, whose
keys are masked, and D and Dv with zeros where a kernel wants multiples of 128.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlo_tools.composites import AttentionSpec, Implementation, fix_empty_rows
from hlo_tools.errors import UnsupportedError
from hlo_tools.targets import Target
from pallas_kernels.attention import cost, tiles
from pallas_kernels.attention.tpu_blocks import LANES, pad, padded_length
from pallas_kernels.attention.tpu_grad import GRAD

# Largest first; tiles of [512,512] float32 scores and double-buffered keys fit the
# smallest VMEM of v5e, 16 MiB, at head dim 256 in float32.
Q_BLOCKS = (512, 256, 128)
KEY_BLOCKS = (1024, 512, 256, 128)
COMPUTE_KEYS = 512
# A masked score; finite also when flash attention adds its own mask value to it.
MASKED = -1e30
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Plan:
    """How a site is put to the kernels.

    Attributes:
      kernel: "splash" or "flash".
      key_mask: the mask is one of keys, [B|1,1,1,1,S].
      dense_bias: masks and biases as one float32 [B,H,T,S].
      q_len, k_len: T and S, padded.
      block_q, block_k, block_k_compute: block sizes.
    """

    kernel: str
    key_mask: bool
    dense_bias: bool
    q_len: int
    k_len: int
    block_q: int
    block_k: int
    block_k_compute: int


def make_plan(spec: AttentionSpec) -> Plan:
    """Returns how a named site is put to the kernels.

    Raises:
      UnsupportedError: neither can compute it.
    """
    mask = _mask_shape(spec)
    key_mask = mask is not None and mask[1:4] == (1, 1, 1)
    dense = spec.has_bias or (mask is not None and not key_mask)
    q_len, block_q = padded_length(spec.q_len, Q_BLOCKS)
    k_len, block_k = padded_length(spec.k_len, KEY_BLOCKS)
    sizes = (q_len, k_len, block_q, block_k, min(block_k, COMPUTE_KEYS))
    flash = spec.softcap is None and spec.band in ((None, None), (None, 0))
    # Splash attention knows no batch: a mask for each costs it another grid dim.
    own_masks = mask is not None and key_mask and mask[0] > 1
    if not dense and _scale_is_exact(spec) and not (own_masks and flash):
        return Plan("splash", key_mask, False, *sizes)
    if flash:
        return Plan("flash", key_mask and not dense, dense, *sizes)
    why = "a mask or bias of whole rows" if dense else "a scale not exact in q"
    raise UnsupportedError(
        f"softcaps and windows are for splash attention, which can not take {why}"
    )


def _mask_shape(spec: AttentionSpec) -> tuple[int, ...] | None:
    if not spec.has_mask:
        return None
    sides = [jax.ShapeDtypeStruct(side.shape, side.dtype) for side in spec.sides]
    mask = jax.eval_shape(
        lambda *sides: tiles.rank5(spec.mask_fn(sides, *_positions(spec))), *sides
    )
    return mask.shape


def _positions(spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    return (
        jnp.arange(spec.q_len, dtype=jnp.int32),
        jnp.arange(spec.k_len, dtype=jnp.int32),
    )


def _scale_is_exact(spec: AttentionSpec) -> bool:
    """Whether q may be scaled in its own dtype.

    It may if that is exact, or in float32 to all purposes, or if the site itself
    rounds the scores as coarsely.
    """
    power_of_two = spec.scale > 0 and math.frexp(spec.scale)[0] == 0.5
    return power_of_two or "float32" == spec.q_dtype or spec.score_dtype == spec.q_dtype


def tpu_attention(
    spec: AttentionSpec,
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *sides: jax.Array,
) -> jax.Array:
    """Computes a site with the planned kernel.

    Args:
      spec: a site that `IMPLEMENTATION` supports.
      plan: from `make_plan`.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *sides: [B|1,K|1,G|1,T|1,S|1] each.

    Returns:
      [B,T,H,Dv] in `spec.out_dtype`.
    """
    first_v = v
    q, k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))  # [B,H|K,T|S,D]
    q, k, v = (
        pad(x, {2: n})
        for x, n in zip((q, k, v), (plan.q_len, plan.k_len, plan.k_len), strict=True)
    )
    run = _splash if plan.kernel == "splash" else _flash
    out = run(spec, plan, q, k, v, sides)  # [B,H,T',Dv']
    out = out[:, :, : spec.q_len, : spec.value_dim]
    out = jnp.transpose(out, (0, 2, 1, 3)).astype(spec.out_dtype)
    return fix_empty_rows(spec, out, first_v, *sides)


def _key_segments(spec: AttentionSpec, plan: Plan, sides) -> jax.Array | None:
    """Returns int32 [B|1,S'], 1 where a key may be seen; None if all may."""
    if not plan.key_mask and plan.k_len == spec.k_len:
        return None
    seen = jnp.ones((1, spec.k_len), bool)
    if plan.key_mask:
        seen = tiles.rank5(spec.mask_fn(sides, *_positions(spec)))[:, 0, 0, 0]
    seen = jnp.broadcast_to(seen, (seen.shape[0], spec.k_len)).astype(jnp.int32)
    return pad(seen, {1: plan.k_len})


def _splash(spec: AttentionSpec, plan: Plan, q, k, v, sides) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    shape = (plan.q_len, plan.k_len)
    low, high = spec.band
    if low is None and high is None:
        mask = masks.FullMask(shape)
    else:
        left = None if low is None else -low
        mask = masks.LocalMask(shape, window_size=(left, high), offset=0)
    segments = _key_segments(spec, plan, sides)
    own_masks = segments is not None and segments.shape[0] > 1
    heads = spec.heads if own_masks else spec.batch * spec.heads
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(
            block_q=plan.block_q,
            block_kv=plan.block_k,
            block_kv_compute=plan.block_k_compute,
        ),
        attn_logits_soft_cap=spec.softcap,
        head_shards=1,
        q_seq_shards=1,
    )
    q = q * jnp.asarray(spec.scale, q.dtype)
    queries = jnp.ones((plan.q_len,), jnp.int32)
    if own_masks:

        def one(q, k, v, keys):
            return kernel(q, k, v, kernels.SegmentIds(queries, keys))

        return jax.vmap(one)(q, k, v, segments)
    # Batch and heads are one to the kernel: head h uses key-value head h // G.
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    ids = None if segments is None else kernels.SegmentIds(queries, segments[0])
    out = kernel(*flat, ids)
    return out.reshape(spec.batch, spec.heads, *out.shape[1:])


def _flash(spec: AttentionSpec, plan: Plan, q, k, v, sides) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import flash_attention as kernels

    depth = max(spec.head_dim, spec.value_dim)
    if depth > LANES:
        depth = -(-depth // LANES) * LANES
    q, k, v = (pad(x, {3: depth}) for x in (q, k, v))
    k, v = (jnp.repeat(x, spec.group, axis=1) for x in (k, v))  # [B,H,S',D']
    segments = None
    if not plan.dense_bias:
        seen = _key_segments(spec, plan, sides)
        if seen is not None:
            queries = jnp.ones((spec.batch, plan.q_len), jnp.int32)
            seen = jnp.broadcast_to(seen, (spec.batch, plan.k_len))
            segments = kernels.SegmentIds(queries, seen)
    return kernels.flash_attention(
        q,
        k,
        v,
        _dense_bias(spec, plan, sides) if plan.dense_bias else None,
        segments,
        causal=spec.band == (None, 0),
        sm_scale=spec.scale,
        block_sizes=kernels.BlockSizes(
            block_b=1,
            block_q=plan.block_q,
            block_k_major=plan.block_k,
            block_k=plan.block_k_compute,
        ),
    )


def _dense_bias(spec: AttentionSpec, plan: Plan, sides) -> jax.Array:
    """Returns float32 [B,H,T',S'], what flash attention adds before it scales."""
    positions = _positions(spec)
    bias = jnp.zeros((1,) * 5, jnp.float32)
    if spec.has_bias:
        bias = tiles.rank5(spec.bias_fn(sides, *positions)).astype(jnp.float32)
        bias = bias / spec.scale
    if spec.has_mask:
        mask = tiles.rank5(spec.mask_fn(sides, *positions))
        bias = jnp.where(mask, bias, MASKED / abs(spec.scale))
    full = (spec.batch, spec.kv_heads, spec.group, spec.q_len, spec.k_len)
    bias = jnp.broadcast_to(bias, full).reshape(spec.batch, spec.heads, *full[3:])
    bias = pad(bias, {2: plan.q_len})
    return pad(bias, {3: plan.k_len}, MASKED / abs(spec.scale))


def _supports(spec: AttentionSpec, target: Target) -> str | None:
    if not spec.q_dtype == spec.k_dtype == spec.v_dtype:
        return f"q, k, v differ: {spec.q_dtype}, {spec.k_dtype}, {spec.v_dtype}"
    if spec.q_dtype not in DTYPES:
        return f"takes bfloat16 and float32, not {spec.q_dtype}"
    if "float64" in (spec.compute_dtype.name, spec.out_dtype):
        return "computes in float32, not in float64"
    if np.dtype(jnp.dtype(spec.out_dtype)).itemsize > jnp.dtype(spec.q_dtype).itemsize:
        return f"rounds the result to {spec.q_dtype}; here: {spec.out_dtype}"
    if spec.precision != ("DEFAULT", "DEFAULT") and spec.q_dtype == "float32":
        return f"products at default precision only, not {spec.precision}"
    if not spec.named:
        return "the scores are modified in a way that it has no form for"
    if not spec.masks_are_negligible:
        return f"masked scores are {spec.mask_fill}, not so low as to count nothing"
    if spec.score_count == 0 or spec.scale <= 0:
        return "an operand is empty, or the scale is not positive"
    if cost.visible_scores(spec, 0) == 0:
        return "no query sees a key"
    try:
        make_plan(spec)
    except UnsupportedError as error:
        return str(error)
    return None


def _seconds(spec: AttentionSpec, target: Target) -> float:
    return cost.tpu_seconds(spec, target, make_plan(spec).dense_bias)


def _temp_bytes(spec: AttentionSpec, target: Target) -> int:
    """The dense bias, transposed and padded operands, repeated k and v."""
    plan = make_plan(spec)
    size = jnp.dtype(spec.q_dtype).itemsize
    depth = spec.head_dim + spec.value_dim
    kv_heads = spec.heads if plan.kernel == "flash" else spec.kv_heads
    operands = plan.q_len * spec.heads + plan.k_len * kv_heads
    total = spec.batch * operands * depth * size
    if plan.dense_bias:
        total += 4 * spec.batch * spec.heads * plan.q_len * plan.k_len
    return total


def _config(spec: AttentionSpec, target: Target) -> dict[str, Any]:
    plan = make_plan(spec)
    names = ("kernel", "block_q", "block_k", "block_k_compute")
    return {name: getattr(plan, name) for name in names}


def _build(spec: AttentionSpec, target: Target) -> Callable:
    return functools.partial(tpu_attention, spec, make_plan(spec))


IMPLEMENTATION = Implementation(
    name="tpu-flash",
    platforms=("tpu",),
    supports=_supports,
    seconds=_seconds,
    temp_bytes=_temp_bytes,
    config=_config,
    build=_build,
    grad=GRAD,
)
