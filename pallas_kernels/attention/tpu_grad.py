"""Attention on TPUs together with its backward pass, by kernels of our own.

The kernels inside JAX give their row statistics to private functions only, so both
halves are those of tpu_grad_kernels.py. They take any named site: causal, window,
offset, softcap, grouped heads and Dv != D are their own; masks and biases are read as
one float32 [B|1,H|1,T|1,S], whose dims of size 1 stay so. Nothing but the operands of
the products is rounded, as at default precision on a TPU's MXU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from hlo_tools.composites import AttentionSpec, fix_empty_rows
from hlo_tools.gradients import GradImplementation, GradSpec, Wanted
from hlo_tools.targets import Target
from pallas_kernels.attention import cost, cost_accelerators_grad, tiles
from pallas_kernels.attention import tpu_grad_kernels as kernels
from pallas_kernels.attention.empty_rows import add_empty_rows, without_empty_rows
from pallas_kernels.attention.tpu_blocks import LANES, pad, padded_length
from pallas_kernels.attention.tpu_tiles import Form, Sides

# Largest first: six float32 tiles, double-buffered operands and the sums fit the
# 16 MiB of VMEM that a kernel gets, at head dim 256 in float32.
BLOCKS = (512, 256, 128)
MAX_HEAD_DIM = 256
DTYPES = ("bfloat16", "float32")


def make_form(spec: AttentionSpec) -> Form:
    """Returns what the kernels compute for a named site."""
    low, high = spec.band
    _, block_q = padded_length(spec.q_len, BLOCKS)
    _, block_k = padded_length(spec.k_len, BLOCKS)
    return Form(spec.scale, spec.softcap, low, high, spec.k_len, block_q, block_k)


def tpu_forward(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, *sides: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes a site, and what its backward pass needs.

    Args:
      spec: a site that `GRAD` supports.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *sides: [B|1,K|1,G|1,T|1,S|1] each.

    Returns:
      [B,T,H,Dv] in `spec.out_dtype`; the largest score of each row and the sum of
      its exponentials, float32 [B,H,T].
    """
    form = make_form(spec)
    queries, keys, values = _operands(spec, q, k, v)
    out, largest, sums = kernels.forward(
        form, queries, keys, values, Sides(scores_bias(spec, sides)),
        jnp.dtype(spec.out_dtype),
    )  # fmt: skip
    # A row that sees nothing: its probabilities are zero in the backward pass.
    sums = jnp.where(sums == 0, 1, sums)
    out = jnp.transpose(out[:, :, : spec.q_len, : spec.value_dim], (0, 2, 1, 3))
    largest, sums = (x[:, :, 0, : spec.q_len] for x in (largest, sums))
    return fix_empty_rows(spec, out, v, *sides), largest, sums


def tpu_backward(
    spec: AttentionSpec,
    grad: GradSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
) -> tuple[jax.Array, ...]:
    """Computes the gradients of a site.

    Args:
      spec: a site that `GRAD` supports.
      grad: what is wanted.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *rest: the sides, then `tpu_forward`'s results, then dout [B,T,H,Dv].

    Returns:
      The gradients in the order of `grad.wanted`.
    """
    *sides, out, largest, sums, dout = rest
    form = make_form(spec)
    added = Sides(scores_bias(spec, tuple(sides)))
    # NaN where `fix_empty_rows` put it would spread
    seen_out = without_empty_rows(spec, out, *sides).astype(jnp.float32)
    delta = (seen_out * dout.astype(jnp.float32)).sum(-1)  # [B,T,H]
    rows = [largest, sums, jnp.transpose(delta, (0, 2, 1))]
    q_len = _padded_lengths(spec)[0]
    # The rows that pad have a sum of 1: zero would make NaN of their zeros.
    rows = [
        pad(x, {2: q_len}, value)[:, :, None]
        for x, value in zip(rows, (0, 1, 0), strict=True)
    ]
    (cotangent,) = _transposed(spec, dout)
    operands = [*_operands(spec, q, k, v), cotangent, *rows]
    dtypes = dict(zip(grad.wanted, grad.dtypes, strict=True))
    results: dict[Wanted, jax.Array] = {}
    if "q" in dtypes:
        dq = kernels.query_gradient(form, operands, added, jnp.dtype(dtypes["q"]))
        results["q"] = _cut(dq, q.shape)
    if "k" in dtypes or "v" in dtypes:
        key_dtypes = (dtypes.get("k", spec.k_dtype), dtypes.get("v", spec.v_dtype))
        dk, dv = kernels.key_gradients(form, operands, added, key_dtypes)
        results["k"] = _cut(dk, k.shape)
        results["v"] = add_empty_rows(spec, _cut(dv, v.shape), dout, *sides)
    return tuple(results[name] for name in grad.wanted)


def _padded_lengths(spec: AttentionSpec) -> tuple[int, int]:
    return padded_length(spec.q_len, BLOCKS)[0], padded_length(spec.k_len, BLOCKS)[0]


def _depth(dim: int) -> int:
    """Returns a head dim in whole lanes, or half of them."""
    return LANES // 2 if dim <= LANES // 2 else -(-dim // LANES) * LANES


def _transposed(spec: AttentionSpec, *arrays: jax.Array) -> list[jax.Array]:
    """Returns [B,T,H,D] arrays as [B,H,T',D']."""
    q_len = _padded_lengths(spec)[0]
    arrays = tuple(jnp.transpose(x, (0, 2, 1, 3)) for x in arrays)
    return [pad(x, {2: q_len, 3: _depth(x.shape[3])}) for x in arrays]


def _operands(spec: AttentionSpec, q, k, v) -> list[jax.Array]:
    """Returns q, k, v as the kernels take them."""
    k_len = _padded_lengths(spec)[1]
    k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (k, v))
    k, v = (pad(x, {2: k_len, 3: _depth(x.shape[3])}) for x in (k, v))
    return [*_transposed(spec, q), k, v]


def _cut(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns [B,H,T',D'] as [B,T,H,D]."""
    return jnp.transpose(array, (0, 2, 1, 3))[:, : shape[1], :, : shape[3]]


def scores_bias(spec: AttentionSpec, sides: tuple[jax.Array, ...]) -> jax.Array | None:
    """Returns what is added to the scaled scores, -inf for a mask, or None.

    Args:
      spec: the site.
      sides: whole.

    Returns:
      float32 [B|1,H|1,T'|1,S'].
    """
    q_pos = jnp.arange(spec.q_len, dtype=jnp.int32)
    k_pos = jnp.arange(spec.k_len, dtype=jnp.int32)
    if not (spec.has_bias or spec.has_mask):
        return None
    bias = jnp.zeros((1,) * 5, jnp.float32)
    if spec.has_bias:
        bias = tiles.rank5(spec.bias_fn(sides, q_pos, k_pos)).astype(jnp.float32)
    if spec.has_mask:
        mask = tiles.rank5(spec.mask_fn(sides, q_pos, k_pos))
        bias = jnp.where(mask, bias, -jnp.inf)
    b, kv_heads, group, q_len, _ = bias.shape
    if kv_heads * group > 1:
        kv_heads, group = spec.kv_heads, spec.group
    bias = jnp.broadcast_to(bias, (b, kv_heads, group, q_len, spec.k_len))
    bias = bias.reshape(b, kv_heads * group, q_len, spec.k_len)
    padded_q, padded_k = _padded_lengths(spec)
    return pad(bias, {2: padded_q if q_len > 1 else 1, 3: padded_k})


def _supports(spec: AttentionSpec, grad: GradSpec, target: Target) -> str | None:
    return _unsupported_dtypes(spec, grad) or _unsupported_form(spec, grad, target)


def _unsupported_dtypes(spec: AttentionSpec, grad: GradSpec) -> str | None:
    dtype = spec.q_dtype
    if not dtype == spec.k_dtype == spec.v_dtype:
        return f"q, k, v differ: {dtype}, {spec.k_dtype}, {spec.v_dtype}"
    if dtype not in DTYPES:
        return f"takes bfloat16 and float32, not {dtype}"
    others = (spec.softmax_dtype, spec.out_dtype, grad.dout_dtype, *grad.dtypes)
    if "float64" in (spec.compute_dtype.name, *others):
        return "computes in float32, not in float64"
    # float32 values are rounded to bfloat16 by the MXU itself at default precision
    if spec.precision != ("DEFAULT", "DEFAULT"):
        return f"products at default precision only, not {spec.precision}"
    return None


def _unsupported_form(
    spec: AttentionSpec, grad: GradSpec, target: Target
) -> str | None:
    if target.platform != "tpu":
        return f"it runs on TPUs, not on {target.device_kind}"
    if not spec.named:
        return "the scores are modified in a way that it has no form for"
    if grad.sides:
        return "it has no gradients of biases"
    if spec.has_bias and spec.bias_dtype == "float64":
        return "would round the float64 bias to float32"
    if not spec.masks_are_negligible:
        return f"masked scores are {spec.mask_fill}, not so low as to count nothing"
    depth = max(spec.head_dim, spec.value_dim)
    if depth > MAX_HEAD_DIM:
        return f"head dim {depth}: at most {MAX_HEAD_DIM}"
    if spec.score_count == 0 or cost.visible_scores(spec, 0) == 0:
        return "no query sees a key"
    return None


def _seconds(spec: AttentionSpec, grad: GradSpec, target: Target) -> float:
    biased = spec.has_bias or spec.has_mask
    return cost_accelerators_grad.tpu_grad_seconds(spec, target, biased)


def _temp_bytes(spec: AttentionSpec, grad: GradSpec, target: Target) -> int:
    """The bias, and operands and results, transposed and padded."""
    size = jnp.dtype(spec.q_dtype).itemsize
    q_len, k_len = _padded_lengths(spec)
    depth = _depth(spec.head_dim) + _depth(spec.value_dim)
    rows = q_len * spec.heads + k_len * spec.kv_heads
    sides = [jax.ShapeDtypeStruct(side.shape, side.dtype) for side in spec.sides]
    bias = jax.eval_shape(lambda *sides: scores_bias(spec, sides), *sides)
    bias_bytes = 0 if bias is None else 4 * math.prod(bias.shape)
    return 2 * spec.batch * rows * depth * size + bias_bytes


def _build(
    spec: AttentionSpec, grad: GradSpec, target: Target
) -> tuple[Callable, Callable]:
    return (
        functools.partial(tpu_forward, spec),
        functools.partial(tpu_backward, spec, grad),
    )


GRAD = GradImplementation(
    supports=_supports, seconds=_seconds, temp_bytes=_temp_bytes, build=_build
)
