"""The Pallas kernels for Hopper GPUs as a backend.

| file | what it holds |
|---|---|
| gpu_forward.py, gpu_forward_compute.py, gpu_forward_plan.py | the forward kernel |
| gpu_backward.py, gpu_backward_plan.py, gpu_backward_worker.py | the backward kernel |
| gpu_backward_compute.py | its warpgroups, up to head dim 128 |
| gpu_backward_deep.py | its warpgroups, above that |
| gpu_backward_queries.py | the second kernel, where dq is not added in memory |
| gpu_scores.py | masks, bias and softcap of a tile of scores |
| gpu_family.py | their configurations |
| gpu_binding.py, gpu_plan.py | the sites that `hlo_tools.jit` binds to them |
| cost_gpu.py | predicted times of these sites |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hlo_tools.errors import UnsupportedError
from hlo_tools.targets import Target
from pallas_kernels import hopper
from pallas_kernels.attention import gpu_family
from pallas_kernels.attention.backends import Backend, empty_operand
from pallas_kernels.attention.gpu_backward import flash_backward
from pallas_kernels.attention.gpu_backward_plan import BackwardConfig
from pallas_kernels.attention.gpu_forward import flash_forward
from pallas_kernels.attention.gpu_forward_plan import ForwardConfig
from pallas_kernels.attention.problem import AttentionProblem, Gradients, Operands

HOPPER = ("h100", "h100-pcie", "h200")
DTYPES = ("bfloat16", "float16")
BIAS_DTYPES = ("bfloat16", "float16", "float32")
MAX_DEPTH = 256
# Columns that a row of swizzled shared memory has room for, of 2 bytes.
DEPTH_MULTIPLE = 64
# Gradients above FLAT_DEPTH, and those from two kernels, were compiled for an H200 and
# interpreted with their races looked for, but have not run on one: not to be chosen.
OFFER_UNTRIED = False
# Above this, two warpgroups share the gradients of 64 keys, and the columns of dq.
FLAT_DEPTH = 128


def unsupported(problem: AttentionProblem, target: Target) -> str | None:
    """Returns why the forward kernel can not compute a problem, or None."""
    if target.spec.name not in HOPPER:
        return f"the kernels are for Hopper GPUs, not for {target.device_kind}"
    if problem.dtype not in DTYPES:
        return f"operands are {problem.dtype}, not one of {', '.join(DTYPES)}"
    if problem.bias is not None and problem.bias_dtype not in BIAS_DTYPES:
        return f"the bias is {problem.bias_dtype}, not one of {', '.join(BIAS_DTYPES)}"
    for name in ("head_dim", "value_dim"):
        if getattr(problem, name) > MAX_DEPTH:
            return f"{name} {getattr(problem, name)} is above {MAX_DEPTH}"
    reason = empty_operand(problem)
    if reason is not None:
        return reason
    return _refusal(lambda: gpu_family.choose_forward(_whole(problem)))


def unsupported_backward(
    problem: AttentionProblem, target: Target, wants_bias: bool
) -> str | None:
    """Returns why the backward kernel can not compute a problem, or None."""
    reason = unsupported(problem, target)
    if reason is not None:
        return reason
    if _is_deep(problem) and not OFFER_UNTRIED:
        return f"gradients for head dims above {FLAT_DEPTH} have not run on a GPU yet"
    if wants_bias and _is_deep(problem):
        return f"no gradient of a bias for head dims above {FLAT_DEPTH}"
    return _refusal(lambda: gpu_family.choose_backward(whole_backward(problem)))


def forward_config(problem: AttentionProblem) -> ForwardConfig:
    """Returns how the forward kernel is cut for a problem that it can compute."""
    return gpu_family.choose_forward(_whole(problem))


def _refusal(choose: Callable[[], Any]) -> str | None:
    try:
        choose()
    except UnsupportedError as error:
        return str(error)
    return None


def _is_deep(problem: AttentionProblem) -> bool:
    return max(problem.head_dim, problem.value_dim) > FLAT_DEPTH


def _whole(
    problem: AttentionProblem, multiple: int = DEPTH_MULTIPLE
) -> AttentionProblem:
    """Returns a problem as the kernels have it, with whole columns.

    Args:
      problem: as it was given.
      multiple: of the columns of q and k.
    """
    return dataclasses.replace(
        problem,
        head_dim=-(-problem.head_dim // multiple) * multiple,
        value_dim=-(-problem.value_dim // DEPTH_MULTIPLE) * DEPTH_MULTIPLE,
        q_lengths=False,
        sinks=False,
    )


def _backward_multiple(problem: AttentionProblem) -> int:
    return DEPTH_MULTIPLE * (2 if _is_deep(problem) else 1)


def whole_backward(problem: AttentionProblem) -> AttentionProblem:
    """Returns a problem as the backward kernels have it."""
    return _whole(problem, _backward_multiple(problem))


def _whole_operands(operands: Operands, multiple: int = DEPTH_MULTIPLE) -> Operands:
    q, k = (hopper.padded(x, 3, multiple) for x in operands[:2])
    v = hopper.padded(operands.v, 3, DEPTH_MULTIPLE)
    return operands._replace(q=q, k=k, v=v, q_lengths=None, sinks=None)


def _forward(
    problem: AttentionProblem, config: Any, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    if config is None:
        config = forward_config(problem)
    elif not isinstance(config, ForwardConfig):
        raise UnsupportedError(f"config: got {config!r}, expected a ForwardConfig")
    out, lse = flash_forward(
        _whole(problem), config, _whole_operands(operands), hopper.interpreting()
    )
    out = out[..., : problem.value_dim]
    if operands.q_lengths is None:
        return out, lse
    inside = _inside(problem, operands)
    out = jnp.where(inside[..., None, None], out, 0)
    return out, jnp.where(inside[:, None], lse, -jnp.inf)


def _inside(problem: AttentionProblem, operands: Operands) -> jax.Array:
    """Returns bool [B,T]: which queries the lengths leave."""
    lengths = operands.q_lengths
    assert lengths is not None
    return jnp.arange(problem.q_len) < lengths[:, None]


def _backward(
    problem: AttentionProblem,
    config: Any,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    wants_bias: bool,
    deterministic: bool,
) -> Gradients:
    if operands.q_lengths is not None:  # a sink gives these rows an lse
        lse = jnp.where(_inside(problem, operands)[:, None], lse, jnp.inf)
    if not isinstance(config, BackwardConfig):  # that of the forward kernel, or none
        config = gpu_family.choose_backward(whole_backward(problem), deterministic)
    elif deterministic:
        config = dataclasses.replace(config, two_kernels=True)
    found = flash_backward(
        whole_backward(problem),
        config,
        _whole_operands(operands, _backward_multiple(problem)),
        lse,
        delta,
        hopper.padded(dout, 3, DEPTH_MULTIPLE),
        wants_bias,
        hopper.interpreting(),
    )
    return found._replace(
        q=found.q[..., : problem.head_dim],
        k=found.k[..., : problem.head_dim],
        v=found.v[..., : problem.value_dim],
    )


BACKEND = Backend(
    name="mosaic-gpu",
    platforms=("gpu",),
    supports=unsupported,
    forward=_forward,
    supports_backward=unsupported_backward,
    backward=_backward,
    deterministic=OFFER_UNTRIED,
)
