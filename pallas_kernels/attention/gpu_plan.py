"""How a site is put to the Pallas kernels for Hopper GPUs.

Band, softcap and grouped heads are the kernels' own. Masks and biases become arrays
of the problem, whose dims of size 1 stay so: the kernels read a mask of keys as such,
and add up the gradient of a bias over them in float32.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hlo_tools.composites import AttentionSpec
from hlo_tools.gradients import GradSpec
from hlo_tools.targets import Target
from pallas_kernels.attention import tiles
from pallas_kernels.attention.problem import AttentionProblem, Operands

# Biases that are exact in one of these are read in it, all others in float32.
NARROW_BIASES = ("bfloat16", "float16")


def make_problem(spec: AttentionSpec, wants_bias: bool = False) -> AttentionProblem:
    """Returns what the kernels compute for a named site.

    Args:
      spec: the site.
      wants_bias: whether the gradient of the bias is wanted: it comes in the dtype
        of the bias, and is float32 then.
    """
    sides = [jax.ShapeDtypeStruct(side.shape, side.dtype) for side in spec.sides]
    bias = jax.eval_shape(lambda *sides: scores_bias(spec, sides, wants_bias), *sides)
    mask = jax.eval_shape(lambda *sides: scores_mask(spec, sides), *sides)
    return AttentionProblem(
        batch=spec.batch,
        q_len=spec.q_len,
        k_len=spec.k_len,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        dtype=spec.q_dtype,
        scale=spec.scale,
        softcap=spec.softcap,
        causal=spec.causal,
        offset=spec.offset,
        window=spec.window,
        bias=None if bias is None else bias.shape,
        bias_dtype=None if bias is None else bias.dtype.name,
        mask=None if mask is None else mask.shape,
    )


def make_operands(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sides: Sequence[jax.Array],
    wants_bias: bool = False,
) -> Operands:
    """Returns the arrays of `make_problem`.

    Args:
      spec: the site.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      sides: [B|1,K|1,G|1,T|1,S|1] each.
      wants_bias: as for `make_problem`.
    """
    bias = scores_bias(spec, sides, wants_bias)
    return Operands(q, k, v, bias=bias, mask=scores_mask(spec, sides))


def scores_bias(
    spec: AttentionSpec, sides: Sequence[jax.Array], wide: bool
) -> jax.Array | None:
    """Returns what is added to the scores, [B|1,H|1,T|1,S|1], or None.

    Args:
      spec: the site.
      sides: whole.
      wide: in float32, not in the narrowest dtype that is exact.
    """
    if not spec.has_bias:
        return None
    narrow = spec.bias_dtype in NARROW_BIASES and not wide
    bias = spec.bias_fn(tuple(sides), *_positions(spec))
    return _of_heads(spec, bias.astype(spec.bias_dtype if narrow else jnp.float32))


def scores_mask(spec: AttentionSpec, sides: Sequence[jax.Array]) -> jax.Array | None:
    """Returns bool [B|1,H|1,T|1,S|1], which keys are left beside the band, or None."""
    if not spec.has_mask:
        return None
    return _of_heads(spec, spec.mask_fn(tuple(sides), *_positions(spec)))


def _positions(spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    return (
        jnp.arange(spec.q_len, dtype=jnp.int32),
        jnp.arange(spec.k_len, dtype=jnp.int32),
    )


def _of_heads(spec: AttentionSpec, array: jax.Array) -> jax.Array:
    """Returns [B|1,K|1,G|1,T|1,S|1] as [B|1,H|1,T|1,S|1]."""
    array = tiles.rank5(array)
    b, kv_heads, group, t, s = array.shape
    if kv_heads * group > 1:  # the kernels broadcast over no heads or over all
        kv_heads, group = spec.kv_heads, spec.group
    array = jnp.broadcast_to(array, (b, kv_heads, group, t, s))
    return array.reshape(b, kv_heads * group, t, s)


@functools.cache
def kernels() -> Any:
    """Returns the backend with the kernels; loaded when a GPU site needs them.

    Raises:
      ImportError: this jaxlib has no Mosaic for GPUs.
    """
    return importlib.import_module("pallas_kernels.attention.gpu")


def unsupported(spec: AttentionSpec, target: Target) -> str | None:
    """Returns why the forward kernel can not compute a site, or None if it can."""
    reason = _unsupported_site(spec)
    if reason is not None:
        return reason
    try:
        return kernels().unsupported(make_problem(spec), target)
    except ImportError as error:
        return f"its kernels can not be imported: {error}"


def unsupported_grad(spec: AttentionSpec, grad: GradSpec, target: Target) -> str | None:
    """Returns why the kernels can not compute a site with its gradients, or None."""
    reason = (
        unsupported(spec, target)
        or _unsupported_gradients(spec, grad)
        or _unsupported_sides(spec, grad)
    )
    if reason is not None:
        return reason
    wants_bias = bool(grad.sides)
    problem = make_problem(spec, wants_bias)
    return kernels().unsupported_backward(problem, target, wants_bias)


def _unsupported_site(spec: AttentionSpec) -> str | None:
    dtype = spec.q_dtype
    if not dtype == spec.k_dtype == spec.v_dtype:
        return f"q, k, v differ: {dtype}, {spec.k_dtype}, {spec.v_dtype}"
    if "float64" in (spec.score_dtype, spec.softmax_dtype):
        return "computes in float32, not in float64"
    if spec.probs_dtype != dtype:
        return f"rounds the probabilities to {dtype}; here: {spec.probs_dtype}"
    if spec.out_dtype != dtype:
        return f"rounds the result to {dtype}; here: {spec.out_dtype}"
    if not spec.named:
        return "the scores are modified in a way that it has no form for"
    if spec.has_bias and spec.bias_dtype == "float64":
        return "would round the float64 bias to float32"
    if not spec.masks_are_negligible:
        return f"masked scores are {spec.mask_fill}, not so low as to count nothing"
    return None


def _unsupported_gradients(spec: AttentionSpec, grad: GradSpec) -> str | None:
    dtype = spec.q_dtype
    if grad.dout_dtype != dtype:
        return f"takes the result's cotangent in {dtype}, not in {grad.dout_dtype}"
    for name, wanted in zip(grad.wanted, grad.dtypes, strict=True):
        if isinstance(name, str) and wanted != dtype:
            return f"rounds gradients to {dtype}; here, of {name}: {wanted}"
    if spec.score_dtype == "float32" and spec.precision[0] != "DEFAULT":
        return (
            f"rounds the gradients of the scores to {dtype}; here: float32 products"
            f" at precision {spec.precision[0]}"
        )
    return None


def _unsupported_sides(spec: AttentionSpec, grad: GradSpec) -> str | None:
    """Between bias and side are the program's own operations, roundings included.

    So a side's gradient is as exact as the program's, unless the program has one
    wider than the side, or something may be rounded before it is summed.
    """
    if not grad.sides:
        return None
    if not spec.has_bias:
        return "the gradient of a side that is no bias"
    for name, wanted in zip(grad.wanted, grad.dtypes, strict=True):
        if isinstance(name, int) and wanted != spec.sides[name].dtype:
            own = spec.sides[name].dtype
            return f"rounds the gradient of side {name} to {own}; here: {wanted}"
    sides = [jax.ShapeDtypeStruct(side.shape, side.dtype) for side in spec.sides]
    bias = functools.partial(_bias_of, spec)
    traced, shape = jax.make_jaxpr(bias)(*sides), jax.eval_shape(bias, *sides).shape
    sums = any(spec.sides[number].shape != shape for number in grad.sides)
    if sums and _is_narrow(traced.jaxpr):
        return "a bias whose gradient is summed after it is rounded"
    return None


def _bias_of(spec: AttentionSpec, *sides: jax.Array) -> jax.Array:
    return tiles.rank5(spec.bias_fn(sides, *_positions(spec)))


def _is_narrow(jaxpr: Any) -> bool:
    """Returns whether anything is computed in less than float32."""
    for eqn in jaxpr.eqns:
        for out in eqn.outvars:
            dtype = out.aval.dtype
            if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
                return True
        inner = [getattr(value, "jaxpr", value) for value in eqn.params.values()]
        if any(_is_narrow(part) for part in inner if hasattr(part, "eqns")):
            return True
    return False
