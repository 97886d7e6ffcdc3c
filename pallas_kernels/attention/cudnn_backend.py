"""cuDNN's fused attention as a backend, by the calls of cudnn_calls.py.

cuDNN works out delta itself, from the result, and knows no gradient of the logsumexp
(`takes_out`). All that hides a key but the causal mask and window is in its bias, of
size T x S. Its backward pass adds up dq in any order, so it is not deterministic.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hlo_tools.composites import AttentionSpec, rows_with_keys
from hlo_tools.gradients import GradSpec
from hlo_tools.targets import Target
from pallas_kernels.attention.backends import Backend
from pallas_kernels.attention.cudnn_calls import (
    HALF_DTYPES,
    backward_call,
    training_call,
)
from pallas_kernels.attention.cudnn_grad import GRAD
from pallas_kernels.attention.cudnn_plan import make_plan, scores_bias
from pallas_kernels.attention.online_backend import make_spec
from pallas_kernels.attention.problem import (
    AttentionProblem,
    Gradients,
    Operands,
    operand_shapes,
)


def _forward(
    problem: AttentionProblem, config: Any, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    spec, sides = make_spec(problem, operands)
    plan = make_plan(spec)
    q, k, v = operands[:3]
    keys = slice(plan.first, plan.end)
    out, lse = training_call(
        q, k[:, keys], v[:, keys], scores_bias(spec, plan, tuple(sides)),
        spec.scale, plan.causal, plan.window,
    )  # fmt: skip
    if not _may_be_empty(problem):
        return out, lse
    seen = rows_with_keys(spec, *sides)  # [B|1,K|1,G|1,T]
    whole = (problem.batch, problem.kv_heads, problem.group, problem.q_len)
    seen = jnp.broadcast_to(seen, whole).reshape(lse.shape)
    rows = jnp.transpose(seen, (0, 2, 1))[..., None]
    return jnp.where(rows, out, jnp.zeros_like(out)), jnp.where(seen, lse, -jnp.inf)


def _may_be_empty(problem: AttentionProblem) -> bool:
    """Whether a query may see no key."""
    low, high = problem.band
    first_sees = high is None or high >= 0
    last_sees = low is None or problem.q_len - 1 + low < problem.k_len
    parts = (problem.segments, problem.q_lengths, problem.k_lengths)
    return any(parts) or problem.mask is not None or not (first_sees and last_sees)


def _backward(
    problem: AttentionProblem,
    config: Any,
    operands: Operands,
    lse: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    wants_bias: bool,
    deterministic: bool,
) -> Gradients:
    spec, sides = make_spec(problem, operands)
    plan = make_plan(spec)
    q, k, v = operands[:3]
    keys = slice(plan.first, plan.end)
    # All scores of a row that sees no key are masked: exp(score - 0) is 0.
    statistics = jnp.where(jnp.isinf(lse), 0, lse)
    found = backward_call(
        q, k[:, keys], v[:, keys], scores_bias(spec, plan, tuple(sides)),
        out, statistics, dout, spec.scale, plan.causal, plan.window,
        wants_bias and problem.bias is not None,
    )  # fmt: skip
    hidden = ((0, 0), (plan.first, problem.k_len - plan.end), (0, 0), (0, 0))
    dk, dv = (jnp.pad(x, hidden) for x in (found.dk, found.dv))
    return Gradients(found.dq, dk, dv, found.dbias)


def _spec_of(problem: AttentionProblem) -> AttentionSpec:
    found = []
    jax.eval_shape(
        lambda operands: found.append(make_spec(problem, operands)[0]),
        operand_shapes(problem),
    )
    return found[0]


def _unsupported(
    problem: AttentionProblem, target: Target, wants_bias: bool
) -> str | None:
    sizes = (problem.batch, problem.q_len, problem.k_len, problem.heads)
    if 0 in (*sizes, problem.head_dim, problem.value_dim):
        return "an operand is empty"
    if problem.dtype not in HALF_DTYPES:
        return f"takes bfloat16 and float16, not {problem.dtype}"
    if problem.bias_dtype == "float64":
        return "would round the float64 bias to float32"
    wanted, dtypes = ("q", "k", "v"), (problem.dtype,) * 3
    if wants_bias and problem.bias_dtype is not None:
        wanted, dtypes = (*wanted, 0), (*dtypes, problem.bias_dtype)
    grad = GradSpec(wanted, dtypes, problem.dtype)
    return GRAD.supports(_spec_of(problem), grad, target)


def _supports(problem: AttentionProblem, target: Target) -> str | None:
    return _unsupported(problem, target, False)


BACKEND = Backend(
    name="cudnn",
    platforms=("gpu",),
    supports=_supports,
    forward=_forward,
    supports_backward=_unsupported,
    backward=_backward,
    deterministic=False,
    takes_out=True,
)
