"""cuDNN's fused attention together with its backward pass.

The forward half keeps the logsumexp of each row, the backward half computes the
scores again from it. cuDNN rounds the probabilities and the gradients of the scores
to the dtype of q before their products, and the results to it as well.

Its gradient of the bias has that dtype too, whatever the bias has. So a side's
gradient is taken from it only if the bias is in bfloat16 and has the side's own
shape: then the sums over batch and heads are cuDNN's own, and nothing that was
rounded is summed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from hlo_tools.composites import AttentionSpec, fix_empty_rows
from hlo_tools.gradients import GradImplementation, GradSpec, Wanted
from hlo_tools.targets import Target
from pallas_kernels.attention import cost_accelerators_grad as cost
from pallas_kernels.attention import tiles
from pallas_kernels.attention.cudnn_calls import backward_call, training_call
from pallas_kernels.attention.cudnn_plan import (
    Plan,
    averages_empty_rows,
    bias_bytes,
    has_bias,
    make_plan,
    scores_bias,
    unsupported,
)
from pallas_kernels.attention.empty_rows import (
    add_empty_rows,
    without_empty_rows,
    without_lost_rows,
)


def cudnn_forward(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, *sides: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes a site, and what its backward pass needs.

    Args:
      spec: a site that `GRAD` supports.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *sides: [B|1,K|1,G|1,T|1,S|1] each.

    Returns:
      [B,T,H,Dv] in `spec.out_dtype`, and float32 [B,H,T].
    """
    plan = make_plan(spec)
    bias = scores_bias(spec, plan, sides)
    keys = slice(plan.first, plan.end)
    out, statistics = training_call(
        q, k[:, keys], v[:, keys], bias, spec.scale, plan.causal, plan.window
    )
    if not averages_empty_rows(spec, plan):
        out = fix_empty_rows(spec, out, v, *sides)
    return out, statistics


def cudnn_backward(
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
      *rest: the sides, then `cudnn_forward`'s results, then dout [B,T,H,Dv].

    Returns:
      The gradients in the order of `grad.wanted`.
    """
    *sides, out, statistics, dout = rest
    sides = tuple(sides)
    plan = make_plan(spec)
    keys = slice(plan.first, plan.end)
    grads = backward_call(
        q,
        k[:, keys],
        v[:, keys],
        scores_bias(spec, plan, sides),
        # NaN where `fix_empty_rows` put it would spread
        without_empty_rows(spec, out, *sides),
        statistics,
        without_lost_rows(spec, without_empty_rows(spec, dout, *sides), statistics),
        spec.scale,
        plan.causal,
        plan.window,
        bool(grad.sides),
    )
    hidden = ((0, 0), (plan.first, spec.k_len - plan.end), (0, 0), (0, 0))
    dk, dv = (jnp.pad(x, hidden) for x in (grads.dk, grads.dv))
    dv = add_empty_rows(spec, dv, dout, *sides)
    results: dict[Wanted, jax.Array] = {"q": grads.dq, "k": dk, "v": dv}
    if grads.dbias is not None:
        results |= _side_gradients(spec, grad, plan, sides, grads.dbias)
    return tuple(results[name] for name in grad.wanted)


def _side_gradients(
    spec: AttentionSpec,
    grad: GradSpec,
    plan: Plan,
    sides: tuple[jax.Array, ...],
    dbias: jax.Array,
) -> dict[Wanted, jax.Array]:
    """Returns the gradients of the wanted sides, by their numbers."""

    def bias_of(*wanted):
        chosen = dict(zip(grad.sides, wanted, strict=True))
        return scores_bias(
            spec, plan, tuple(chosen.get(i, side) for i, side in enumerate(sides))
        )

    _, vjp = jax.vjp(bias_of, *(sides[i] for i in grad.sides))
    return dict(zip(grad.sides, vjp(dbias), strict=True))


def _supports(spec: AttentionSpec, grad: GradSpec, target: Target) -> str | None:
    return (
        unsupported(spec, target)
        or _unsupported_dtypes(spec, grad)
        or _unsupported_bias(spec, grad)
    )


def _unsupported_dtypes(spec: AttentionSpec, grad: GradSpec) -> str | None:
    dtype = spec.q_dtype
    if spec.out_dtype != dtype:
        return f"takes the result in {dtype}, not in {spec.out_dtype}"
    if grad.dout_dtype != dtype:
        return f"takes the result's cotangent in {dtype}, not in {grad.dout_dtype}"
    for name, wanted in zip(grad.wanted, grad.dtypes, strict=True):
        if wanted != dtype:
            return f"rounds gradients to {dtype}; here, of {name}: {wanted}"
    if "float64" in (spec.score_dtype, spec.softmax_dtype):
        return "computes in float32, not in float64"
    if spec.score_dtype == "float32" and spec.precision[0] != "DEFAULT":
        return (
            f"rounds the gradients of the scores to {dtype}; here: float32 products"
            f" at precision {spec.precision[0]}"
        )
    return None


def _unsupported_bias(spec: AttentionSpec, grad: GradSpec) -> str | None:
    plan = make_plan(spec)
    keys = plan.end - plan.first
    # jax.nn's condition for training with a bias
    if has_bias(spec, plan) and (spec.q_len % 2 or keys % 2):
        return f"a mask or bias of odd size: {spec.q_len} queries, {keys} keys"
    if not grad.sides:
        return None
    if not spec.has_bias:
        return "the gradient of a side that is no bias"
    if not spec.q_dtype == spec.bias_dtype == "bfloat16":
        return f"gradients of a bias in bfloat16 only; here: {spec.bias_dtype}"
    sides = [jax.ShapeDtypeStruct(side.shape, side.dtype) for side in spec.sides]
    shape = jax.eval_shape(functools.partial(_bias, spec), *sides).shape
    if shape[1] * shape[2] not in (1, spec.heads) or shape[3:] != (spec.q_len, keys):
        return f"a bias whose gradient is summed after it is rounded: {shape}"
    for number in grad.sides:
        if spec.sides[number].shape != shape:
            return f"side {number} has not the shape of the bias, {shape}"
    return None


def _bias(spec: AttentionSpec, *sides: jax.Array) -> jax.Array:
    q_pos = jnp.arange(spec.q_len, dtype=jnp.int32)
    k_pos = jnp.arange(spec.k_len, dtype=jnp.int32)
    return tiles.rank5(spec.bias_fn(sides, q_pos, k_pos))


def _seconds(spec: AttentionSpec, grad: GradSpec, target: Target) -> float:
    biased = has_bias(spec, make_plan(spec))
    return cost.cudnn_grad_seconds(spec, target, biased, bool(grad.sides))


def _temp_bytes(spec: AttentionSpec, grad: GradSpec, target: Target) -> int:
    """The bias and its gradient, and cuDNN's workspace."""
    bias = bias_bytes(spec, make_plan(spec))
    return (2 if grad.sides else 1) * bias + cost.cudnn_grad_workspace_bytes(spec)


def _build(
    spec: AttentionSpec, grad: GradSpec, target: Target
) -> tuple[Callable, Callable]:
    return (
        functools.partial(cudnn_forward, spec),
        functools.partial(cudnn_backward, spec, grad),
    )


GRAD = GradImplementation(
    supports=_supports, seconds=_seconds, temp_bytes=_temp_bytes, build=_build
)
