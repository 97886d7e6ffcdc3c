"""Problems to measure the GPU attention kernels on, and their random arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import AttentionProblem, Operands

_TOKENS = 16384  # of a batch: as FlashAttention's published benchmarks


def _problem(batch, length, heads, kv_heads, depth, **parts) -> AttentionProblem:
    return AttentionProblem(
        batch, length, parts.pop("k_len", length), heads, kv_heads, depth,
        parts.pop("value_dim", depth),
        "bfloat16", scale=1 / math.sqrt(depth), **parts,
    )  # fmt: skip


def _grid() -> tuple[AttentionProblem, ...]:
    """16 K tokens, 2048 wide, by length and head dim, full and causal."""
    return tuple(
        _problem(_TOKENS // length, length, 2048 // d, 2048 // d, d, causal=causal)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
        for d in (64, 128, 256)
        for causal in (False, True)
    )


def _features() -> tuple[AttentionProblem, ...]:
    """Grouped heads, windows, softcaps, biases, uneven lengths, and few rows."""
    return (
        _problem(1, 16384, 64, 8, 128, causal=True),
        _problem(4, 4096, 32, 8, 128, causal=True),
        _problem(2, 8192, 32, 8, 128, causal=True, window=(1023, None)),
        _problem(2, 8192, 16, 8, 256, causal=True, softcap=50.0),
        _problem(8, 1000, 16, 16, 64),
        _problem(16, 1024, 16, 16, 192, value_dim=128, causal=True),
        _problem(8, 768, 4, 4, 64, bias=(1, 4, 768, 768), bias_dtype="bfloat16"),
        _problem(1, 1024, 8, 8, 128, causal=True),
    )


def _models() -> tuple[AttentionProblem, ...]:
    """Layers of public models, at batch sizes that fill a GPU and that do not."""
    keys = {"mask": (16, 1, 1, 512)}
    return (
        _problem(32, 197, 12, 12, 64),  # ViT-B/16, 224 pixels
        _problem(8, 577, 16, 16, 64),  # ViT-L/14, 336 pixels
        _problem(16, 512, 16, 16, 64, **keys),  # BERT-large with padding
        _problem(8, 1024, 12, 12, 64, causal=True),  # GPT-2
        _problem(4, 1500, 20, 20, 64),  # Whisper's encoder
        _problem(4, 448, 20, 20, 64, k_len=1500),  # Whisper's decoder, across
        _problem(2, 4096, 10, 10, 64),  # SDXL
        _problem(2, 4096, 10, 10, 64, k_len=77),  # SDXL, of the text
        _problem(1, 4608, 24, 24, 128),  # Flux
        _problem(1, 2048, 32, 8, 128, causal=True),  # Llama 3 8B
        _problem(2, 8192, 32, 8, 128, causal=True),
        _problem(1, 8192, 64, 8, 128, causal=True),  # Llama 3 70B
        _problem(4, 4096, 28, 4, 128, causal=True),  # Qwen2.5 7B
        _problem(4, 8192, 32, 8, 128, causal=True, window=(4095, None)),  # Mistral 7B
        _problem(2, 4096, 8, 4, 256, causal=True, softcap=50.0),  # Gemma 2 2B
        _problem(2, 8192, 16, 8, 256, causal=True, window=(4095, None)),  # Gemma 2 9B
        _problem(1, 16384, 4, 1, 256, causal=True, window=(511, None)),  # Gemma 3 1B
        _problem(4, 4096, 16, 16, 192, value_dim=128, causal=True),  # DeepSeek V2 Lite
        _problem(4, 2048, 9, 3, 64, causal=True),  # SmolLM2 135M
        _problem(8, 512, 12, 12, 64, bias=(1, 12, 512, 512), bias_dtype="bfloat16"),
        _problem(1, 2048, 16, 16, 128, causal=True, segments=True),  # packed
        _problem(4, 4096, 16, 16, 128, causal=True, segments=True),
        _problem(2, 1024, 64, 64, 128, causal=True),
        _problem(1, 512, 32, 32, 128),
    )


def _small() -> tuple[AttentionProblem, ...]:
    return _problem(1, 512, 4, 4, 64), _problem(1, 512, 4, 2, 128, causal=True)


PRESETS: Mapping[str, Callable[[], tuple[AttentionProblem, ...]]] = {
    "grid": _grid,
    "features": _features,
    "models": _models,
    "small": _small,
}


def make_operands(problem: AttentionProblem, seed: int) -> Operands:
    """Returns random arrays for a problem.

    Args:
      problem: what is computed.
      seed: of the random numbers.
    """
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    b, t, s, h, k = (
        problem.batch, problem.q_len, problem.k_len, problem.heads, problem.kv_heads,
    )  # fmt: skip

    def normal(shape, dtype: str | None = problem.dtype):
        return jax.random.normal(next(keys), shape, dtype)

    def segments(length):
        return jnp.broadcast_to(
            jnp.arange(length, dtype=jnp.int32) * 4 // length, (b, length)
        )

    return Operands(
        q=normal((b, t, h, problem.head_dim)),
        k=normal((b, s, k, problem.head_dim)),
        v=normal((b, s, k, problem.value_dim)),
        bias=normal(problem.bias, problem.bias_dtype) if problem.bias else None,
        mask=jax.random.bernoulli(next(keys), 0.9, problem.mask)
        if problem.mask
        else None,
        q_segments=segments(t) if problem.segments else None,
        k_segments=segments(s) if problem.segments else None,
        q_lengths=jnp.full((b,), t, jnp.int32) if problem.q_lengths else None,
        k_lengths=jnp.full((b,), s, jnp.int32) if problem.k_lengths else None,
        sinks=normal((h,), "float32") if problem.sinks else None,
    )


def forward_inputs(problem: AttentionProblem, seed: int) -> tuple[Any, ...]:
    """Returns (operands,)."""
    return (make_operands(problem, seed),)


def backward_inputs(problem: AttentionProblem, seed: int) -> tuple[Any, ...]:
    """Returns (operands, lse and delta float32 [B,H,T], dout [B,T,H,Dv]).

    Times do not depend on the values, so `lse` and `delta` are not those of the
    operands: a large `lse` keeps all probabilities finite.
    """
    rows = (problem.batch, problem.q_len, problem.heads, problem.value_dim)
    first, second = jax.random.split(jax.random.key(seed + 1))
    statistics = (problem.batch, problem.heads, problem.q_len)
    lse = jnp.full(statistics, 20.0, jnp.float32)
    delta = jax.random.normal(first, statistics, jnp.float32)
    dout = jax.random.normal(second, rows, problem.dtype)
    return make_operands(problem, seed), lse, delta, dout
