"""Online softmax in plain JAX as a backend: any problem, on any device.

The loops and tiles are those of online_forward.py and online_backward.py. A problem
becomes an `AttentionSpec`: masks, segments and lengths are its side operands, from
which every tile works out its own part, so nothing of size T x S is made.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hlo_tools.composites import AttentionSpec, SideSpec
from hlo_tools.gradients import GradSpec
from hlo_tools.targets import Target
from pallas_kernels.attention.backends import Backend, default_target, empty_operand
from pallas_kernels.attention.online_backward import online_attention_given
from pallas_kernels.attention.online_forward import online_attention_stats
from pallas_kernels.attention.online_tiling import Blocks, choose_grad_blocks
from pallas_kernels.attention.problem import AttentionProblem, Gradients, Operands


class _Sides(NamedTuple):
    """Side operands [B|1,K|1,G|1,T|1,S|1]; None where there is none."""

    bias: Any = None
    mask: Any = None
    q_segments: Any = None
    k_segments: Any = None
    q_lengths: Any = None
    k_lengths: Any = None


def _sides(problem: AttentionProblem, operands: Operands) -> _Sides:
    def of_heads(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        heads = (problem.kv_heads, problem.group) if x.shape[1] > 1 else (1, 1)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def at(x: jax.Array | None, *axes: int) -> jax.Array | None:
        return None if x is None else jnp.expand_dims(x, axes)

    return _Sides(
        of_heads(operands.bias),
        of_heads(operands.mask),
        at(operands.q_segments, 1, 2, 4),
        at(operands.k_segments, 1, 2, 3),
        at(operands.q_lengths, 1, 2, 3, 4),
        at(operands.k_lengths, 1, 2, 3, 4),
    )


def make_spec(
    problem: AttentionProblem, operands: Operands
) -> tuple[AttentionSpec, list[jax.Array]]:
    """Returns a problem as a site, and its side operands.

    A row that sees no key is 0 / 0 there; the caller puts that right.
    """
    given = _sides(problem, operands)
    names = [name for name in _Sides._fields if getattr(given, name) is not None]
    sides = [getattr(given, name) for name in names]

    def named(arrays: tuple[jax.Array, ...]) -> _Sides:
        return _Sides(**dict(zip(names, arrays, strict=True)))

    def mask_fn(arrays, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        return _visible(named(arrays), q_pos, k_pos)

    def bias_fn(arrays, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        return named(arrays).bias

    wide = jnp.promote_types(problem.dtype, jnp.float32).name
    # bfloat16 products are exact in float32 as they are
    precision = "DEFAULT" if jnp.dtype(problem.dtype).itemsize < 4 else "HIGHEST"
    masked = set(names) - {"bias"}
    hides = bool(masked) or problem.band != (None, None)
    spec = AttentionSpec(
        batch=problem.batch,
        q_len=problem.q_len,
        k_len=problem.k_len,
        kv_heads=problem.kv_heads,
        group=problem.group,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        q_dtype=problem.dtype,
        k_dtype=problem.dtype,
        v_dtype=problem.dtype,
        score_dtype=wide,
        softmax_dtype=wide,
        probs_dtype=problem.dtype,
        out_dtype=problem.dtype,
        precision=(precision, precision),
        scale=problem.scale,
        softcap=problem.softcap,
        causal=problem.causal,
        window=problem.window,
        offset=problem.offset,
        has_bias="bias" in names,
        bias_dtype=problem.bias_dtype,
        has_mask=bool(masked),
        mask_fill=-math.inf if hides else None,
        sides=tuple(SideSpec(x.shape, x.dtype.name) for x in sides),
        bias_fn=bias_fn,
        mask_fn=mask_fn,
    )
    return spec, sides


def _visible(sides: _Sides, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    keep = jnp.ones((1,) * 5, bool)
    if sides.mask is not None:
        keep = keep & sides.mask
    if sides.q_segments is not None:
        keep = keep & (sides.q_segments == sides.k_segments)
    if sides.q_lengths is not None:
        keep = keep & (q_pos[:, None] < sides.q_lengths)
    if sides.k_lengths is not None:
        keep = keep & (k_pos < sides.k_lengths)
    return keep


def _blocks(problem: AttentionProblem, config: Blocks | None) -> Blocks | None:
    """Returns the caller's tile, no larger than the problem."""
    if config is None:
        return None
    for name, size in (("batch", problem.batch), ("kv_heads", problem.kv_heads)):
        if size % getattr(config, name):
            raise ValueError(
                f"config: got {config}, expected a {name} that divides {size}"
            )
    queries = min(config.queries, problem.q_len)
    return config._replace(queries=queries, keys=min(config.keys, problem.k_len))


def _forward(
    problem: AttentionProblem, config: Any, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    spec, sides = make_spec(problem, operands)
    target = default_target()
    blocks = _blocks(problem, config) or choose_grad_blocks(spec, target)[0]
    widen = target.platform == "cpu"
    out, top, total = online_attention_stats(spec, blocks, widen, *operands[:3], *sides)
    seen = total > 0
    lse = jnp.where(seen, top + jnp.log(jnp.where(seen, total, 1)), -jnp.inf)
    seen = jnp.transpose(seen, (0, 2, 1))[..., None]
    return jnp.where(seen, out, jnp.zeros_like(out)), lse


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
    spec, sides = make_spec(problem, operands)
    target = default_target()
    # The bias is the first side.
    wanted, dtypes = ("q", "k", "v"), (problem.dtype,) * 3
    if wants_bias and problem.bias_dtype is not None:
        wanted, dtypes = (*wanted, 0), (*dtypes, problem.bias_dtype)
    grad = GradSpec(wanted, dtypes, problem.dtype)
    blocks = _blocks(problem, config) or choose_grad_blocks(spec, target)[1]
    found = online_attention_given(
        spec, grad, blocks, target.platform == "cpu",
        *operands[:3], *sides, lse, delta, dout,
    )  # fmt: skip
    dq, dk, dv, *rest = found
    dbias = rest[0].reshape(problem.bias) if rest else None
    return Gradients(dq, dk, dv, dbias)


def _supports(problem: AttentionProblem, target: Target) -> str | None:
    return empty_operand(problem)


def _supports_backward(
    problem: AttentionProblem, target: Target, wants_bias: bool
) -> str | None:
    return None


BACKEND = Backend(
    name="online",
    platforms=("cpu", "gpu", "tpu"),
    supports=_supports,
    forward=_forward,
    supports_backward=_supports_backward,
    backward=_backward,
)
