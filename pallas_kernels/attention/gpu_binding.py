"""The Pallas kernels for Hopper GPUs as an implementation of attention sites.

The forward half keeps the logsumexp of each row, the backward half computes the
scores again from it. Scores and softmax are in float32; probabilities and gradients
of scores are rounded to the dtype of q where a product takes them, as are the
results. The gradient of a bias is added up in float32, and not rounded before the
program's own operations between the bias and its sources.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hlo_tools.composites import AttentionSpec, Implementation, fix_empty_rows
from hlo_tools.gradients import GradImplementation, GradSpec, Wanted
from hlo_tools.targets import Target
from pallas_kernels.attention import cost_gpu
from pallas_kernels.attention.empty_rows import (
    add_empty_rows,
    without_empty_rows,
    without_lost_rows,
)
from pallas_kernels.attention.gpu_plan import (
    kernels,
    make_operands,
    make_problem,
    scores_bias,
    unsupported,
    unsupported_grad,
)


def gpu_forward(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, *sides: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes a site, and what its backward pass needs.

    Args:
      spec: a site that `IMPLEMENTATION` supports.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *sides: [B|1,K|1,G|1,T|1,S|1] each.

    Returns:
      [B,T,H,Dv] in `spec.out_dtype`, and float32 [B,H,T].
    """
    problem, operands = make_problem(spec), make_operands(spec, q, k, v, sides)
    with jax.enable_x64(False):  # the kernels count in 32 bits
        out, lse = kernels().BACKEND.forward(problem, None, operands)
    if spec.has_bias:  # it alone hid all keys: -inf is no score to compare with
        hidden = jnp.transpose(jnp.isneginf(lse), (0, 2, 1))[..., None]
        out = jnp.where(hidden, jnp.asarray(jnp.nan, out.dtype), out)
    return fix_empty_rows(spec, out, v, *sides), lse


def gpu_attention(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, *sides: jax.Array
) -> jax.Array:
    """Computes a site: the first result of `gpu_forward`."""
    return gpu_forward(spec, q, k, v, *sides)[0]


def gpu_backward(
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
      *rest: the sides, then `gpu_forward`'s results, then dout [B,T,H,Dv].

    Returns:
      The gradients in the order of `grad.wanted`.
    """
    *sides, out, lse, dout = rest
    # NaN where `fix_empty_rows` put it would spread
    seen_out = without_empty_rows(spec, out, *sides)
    seen_dout = without_empty_rows(spec, dout, *sides)
    seen_dout = without_lost_rows(spec, seen_dout, lse)
    delta = (seen_out.astype(jnp.float32) * seen_dout.astype(jnp.float32)).sum(-1)
    delta = jnp.transpose(delta, (0, 2, 1))  # [B,H,T]
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)  # no probabilities there
    wants_bias = bool(grad.sides)
    problem = make_problem(spec, wants_bias)
    operands = make_operands(spec, q, k, v, sides, wants_bias)
    with jax.enable_x64(False):
        found = kernels().BACKEND.backward(
            problem, None, operands, lse, delta, seen_dout, wants_bias, False
        )
    dv = add_empty_rows(spec, found.v, dout, *sides)
    results: dict[Wanted, jax.Array] = {"q": found.q, "k": found.k, "v": dv}
    if wants_bias:
        results |= _side_gradients(spec, grad, sides, found.bias)
    return tuple(results[name] for name in grad.wanted)


def _side_gradients(
    spec: AttentionSpec, grad: GradSpec, sides: Sequence[jax.Array], dbias: jax.Array
) -> dict[Wanted, jax.Array]:
    """Returns the gradients of the wanted sides, by their numbers."""

    def bias_of(*wanted):
        chosen = dict(zip(grad.sides, wanted, strict=True))
        mixed = [chosen.get(i, side) for i, side in enumerate(sides)]
        return scores_bias(spec, mixed, wide=True)

    _, vjp = jax.vjp(bias_of, *(sides[i] for i in grad.sides))
    return dict(zip(grad.sides, vjp(dbias), strict=True))


def _seconds(spec: AttentionSpec, target: Target) -> float:
    return cost_gpu.seconds(spec, make_problem(spec), target)


def _temp_bytes(spec: AttentionSpec, target: Target) -> int:
    return cost_gpu.temp_bytes(make_problem(spec))


def _config(spec: AttentionSpec, target: Target) -> dict[str, Any]:
    config = kernels().forward_config(make_problem(spec))
    return {"block_q": config.block_q, **dataclasses.asdict(config)}


def _build(spec: AttentionSpec, target: Target) -> Callable:
    return functools.partial(gpu_attention, spec)


def _grad_seconds(spec: AttentionSpec, grad: GradSpec, target: Target) -> float:
    problem = make_problem(spec, bool(grad.sides))
    return cost_gpu.grad_seconds(spec, problem, target, bool(grad.sides))


def _grad_temp_bytes(spec: AttentionSpec, grad: GradSpec, target: Target) -> int:
    wants_bias = bool(grad.sides)
    return cost_gpu.grad_temp_bytes(make_problem(spec, wants_bias), wants_bias)


def _grad_build(
    spec: AttentionSpec, grad: GradSpec, target: Target
) -> tuple[Callable, Callable]:
    return (
        functools.partial(gpu_forward, spec),
        functools.partial(gpu_backward, spec, grad),
    )


GRAD = GradImplementation(
    supports=unsupported_grad,
    seconds=_grad_seconds,
    temp_bytes=_grad_temp_bytes,
    build=_grad_build,
)
IMPLEMENTATION = Implementation(
    name="mosaic-gpu",
    platforms=("gpu",),
    supports=unsupported,
    seconds=_seconds,
    temp_bytes=_temp_bytes,
    config=_config,
    build=_build,
    grad=GRAD,
)
