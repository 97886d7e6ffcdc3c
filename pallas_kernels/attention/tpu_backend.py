"""The Pallas kernels for TPUs as a backend.

The kernels are those of tpu_grad_kernels.py. Everything that a problem may have is
theirs: a bias in its own dtype, a mask as bytes, segments and lengths as they come,
each read in blocks; blocks beyond the lengths are not computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hlo_tools.targets import Target
from pallas_kernels.attention import tpu_grad_kernels as kernels
from pallas_kernels.attention.backends import Backend, empty_operand
from pallas_kernels.attention.problem import AttentionProblem, Gradients, Operands
from pallas_kernels.attention.tpu_blocks import LANES, pad, padded_length
from pallas_kernels.attention.tpu_tiles import Form, Sides

# Largest first; what fits the 16 MiB of VMEM that a kernel gets, at head dim 256.
BLOCKS = {"bfloat16": (512, 256, 128), "float32": (256, 128)}
MAX_HEAD_DIM = 256


class TpuConfig(NamedTuple):
    """Sizes of a tile, multiples of 128.

    Attributes:
      block_q, block_k: queries and keys.
    """

    block_q: int
    block_k: int


def choose_config(problem: AttentionProblem) -> TpuConfig:
    """Returns large tiles, where they pad by little."""
    choices = BLOCKS[problem.dtype]
    lengths = (problem.q_len, problem.k_len)
    return TpuConfig(*(padded_length(length, choices)[1] for length in lengths))


class _Padded(NamedTuple):
    """A problem as the kernels take it.

    Attributes:
      form: the form.
      q_len, k_len: T' and S', whole blocks.
    """

    form: Form
    q_len: int
    k_len: int

    @classmethod
    def of(cls, problem: AttentionProblem, config: TpuConfig | None) -> _Padded:
        config = config or choose_config(problem)
        low, high = problem.band
        form = Form(
            problem.scale, problem.softcap, low, high, problem.k_len, *config,
            exact=problem.dtype == "float32",
        )  # fmt: skip
        pairs = zip((problem.q_len, problem.k_len), config, strict=True)
        return cls(form, *(-(-length // block) * block for length, block in pairs))

    def rows(self, array: jax.Array, length: int) -> jax.Array:
        """Returns [B,T,H,D] as [B,H,T',D']; a head dim is whole lanes, or half."""
        array = jnp.transpose(array, (0, 2, 1, 3))
        dim = array.shape[3]
        depth = LANES // 2 if dim <= LANES // 2 else -(-dim // LANES) * LANES
        return pad(array, {2: length, 3: depth})

    def operands(self, operands: Operands) -> list[jax.Array]:
        q, k, v = operands[:3]
        return [self.rows(q, self.q_len), *(self.rows(x, self.k_len) for x in (k, v))]

    def scores(self, array: jax.Array | None) -> jax.Array | None:
        """Returns [B|1,H|1,T|1,S|1] with the dims that it has padded."""
        if array is None:
            return None
        wanted = {2: self.q_len, 3: self.k_len}
        return pad(array, {i: n for i, n in wanted.items() if array.shape[i] > 1})

    def sides(self, operands: Operands) -> Sides:
        def ids(array: jax.Array | None, length: int) -> jax.Array | None:
            return None if array is None else pad(array[:, None, None], {3: length})

        mask = operands.mask
        return Sides(
            self.scores(operands.bias),
            self.scores(None if mask is None else mask.astype(jnp.int8)),
            ids(operands.q_segments, self.q_len),
            ids(operands.k_segments, self.k_len),
            operands.q_lengths,
            operands.k_lengths,
        )


def _forward(
    problem: AttentionProblem, config: Any, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    padded = _Padded.of(problem, config)
    q, k, v = padded.operands(operands)
    out, largest, sums = kernels.forward(
        padded.form, q, k, v, padded.sides(operands),
        jnp.dtype(problem.dtype),
    )  # fmt: skip
    out = _cut(out, problem.q_len, problem.value_dim)
    return out, (largest + jnp.log(sums))[:, :, 0, : problem.q_len]


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
    padded = _Padded.of(problem, config)
    sides = padded.sides(operands)
    # P = exp(scores - lse) / 1; the rows that pad have none.
    statistics = ((lse, jnp.inf), (jnp.ones_like(lse), 1), (delta, 0))
    rows = [pad(x, {2: padded.q_len}, value)[:, :, None] for x, value in statistics]
    arrays = [*padded.operands(operands), padded.rows(dout, padded.q_len), *rows]
    dtype = jnp.dtype(problem.dtype)
    dq = kernels.query_gradient(padded.form, arrays, sides, dtype)
    dk, dv = kernels.key_gradients(padded.form, arrays, sides, (dtype, dtype))
    dbias = None
    if wants_bias and problem.bias is not None:
        dbias = kernels.bias_gradient(padded.form, arrays, sides)
        dbias = dbias[:, :, : problem.bias[2], : problem.bias[3]]
    return Gradients(
        _cut(dq, problem.q_len, problem.head_dim),
        _cut(dk, problem.k_len, problem.head_dim),
        _cut(dv, problem.k_len, problem.value_dim),
        dbias,
    )


def _cut(array: jax.Array, length: int, dim: int) -> jax.Array:
    """Returns [B,H,T',D'] as [B,T,H,D]."""
    return jnp.transpose(array[:, :, :length, :dim], (0, 2, 1, 3))


def _supports(problem: AttentionProblem, target: Target) -> str | None:
    if problem.dtype not in BLOCKS:
        return f"takes {' and '.join(BLOCKS)}, not {problem.dtype}"
    if problem.bias_dtype == "float64":
        return "would round the float64 bias to float32"
    depth = max(problem.head_dim, problem.value_dim)
    if depth > MAX_HEAD_DIM:
        return f"head dim {depth}: at most {MAX_HEAD_DIM}"
    return empty_operand(problem)


def _supports_backward(
    problem: AttentionProblem, target: Target, wants_bias: bool
) -> str | None:
    return None


BACKEND = Backend(
    name="tpu",
    platforms=("tpu",),
    supports=_supports,
    forward=_forward,
    supports_backward=_supports_backward,
    backward=_backward,
)
