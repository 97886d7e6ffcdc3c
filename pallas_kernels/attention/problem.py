"""What one call of an attention kernel computes, and its arrays.

    scores = softcap(scale * q k^T) + bias, where a key is visible; else -inf
    out = softmax(scores, sink) v, lse = log(sum(exp(scores)) + exp(sink))

Key j is visible to query i iff lo <= j - (i + offset) <= hi, where causal gives hi = 0
and window = (left, right) gives lo = -left, hi = right; iff the mask is true, the
segments are equal, and i and j are below the lengths. A query that sees no key has
out = 0, lse = -inf (or its sink), and no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax

Array = jax.Array | Any


@dataclass(frozen=True)
class AttentionProblem:
    """Shapes, dtypes and named parts of one call.

    Attributes:
      batch, q_len, k_len, heads, kv_heads, head_dim, value_dim: B, T, S, H, K, D, Dv.
      dtype: of q, k, v and out, a name.
      scale: factor of the scores.
      softcap: c of c * tanh(x / c), or None.
      causal: no key after i + offset.
      offset: position of query 0 among the keys.
      window: (left, right), None on a side for no limit there; or None.
      bias: shape [B|1,H|1,T|1,S|1] of the bias, or None.
      bias_dtype: of the bias, a name, or None.
      mask: shape [B|1,H|1,T|1,S|1] of the mask, or None.
      segments: whether queries and keys belong to segments.
      q_lengths, k_lengths: whether each batch element has its own length.
      sinks: whether each head has a sink.
    """

    batch: int
    q_len: int
    k_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    scale: float = 1.0
    softcap: float | None = None
    causal: bool = False
    offset: int = 0
    window: tuple[int | None, int | None] | None = None
    bias: tuple[int, int, int, int] | None = None
    bias_dtype: str | None = None
    mask: tuple[int, int, int, int] | None = None
    segments: bool = False
    q_lengths: bool = False
    k_lengths: bool = False
    sinks: bool = False

    @property
    def group(self) -> int:
        """G, query heads of one key-value head."""
        return self.heads // self.kv_heads

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(lo, hi): key j is visible to query i only if lo <= j - i <= hi.

        None where there is no limit.
        """
        left, right = self.window or (None, None)
        low = None if left is None else self.offset - left
        limits = [right] if right is not None else []
        limits += [0] if self.causal else []
        return low, self.offset + min(limits) if limits else None

    def visible_share(self) -> float:
        """Returns which part of the T x S scores the band leaves."""
        low, high = self.band
        total = 0
        for i in range(self.q_len):
            first = 0 if low is None else min(max(i + low, 0), self.k_len)
            end = self.k_len if high is None else min(max(i + high + 1, 0), self.k_len)
            total += max(end - first, 0)
        return total / max(self.q_len * self.k_len, 1)


class Operands(NamedTuple):
    """The arrays of a call; None where the problem has no such part.

    Attributes:
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      bias: `AttentionProblem.bias`.
      mask: bool, `AttentionProblem.mask`.
      q_segments: int32 [B,T].
      k_segments: int32 [B,S].
      q_lengths: int32 [B].
      k_lengths: int32 [B].
      sinks: float32 [H].
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    mask: Array | None = None
    q_segments: Array | None = None
    k_segments: Array | None = None
    q_lengths: Array | None = None
    k_lengths: Array | None = None
    sinks: Array | None = None


class Gradients(NamedTuple):
    """The gradients of a call; None where none was asked for.

    Attributes:
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      bias: `AttentionProblem.bias`, in its dtype.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None = None


def operand_shapes(problem: AttentionProblem) -> Operands:
    """Returns shapes and dtypes of a problem's operands, as `jax.ShapeDtypeStruct`."""
    keys = (problem.batch, problem.k_len, problem.kv_heads)

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def integers(there: bool, *shape: int) -> jax.ShapeDtypeStruct | None:
        return array("int32", problem.batch, *shape) if there else None

    bias = None
    if problem.bias is not None and problem.bias_dtype is not None:
        bias = array(problem.bias_dtype, *problem.bias)
    return Operands(
        q=array(
            problem.dtype,
            problem.batch,
            problem.q_len,
            problem.heads,
            problem.head_dim,
        ),
        k=array(problem.dtype, *keys, problem.head_dim),
        v=array(problem.dtype, *keys, problem.value_dim),
        bias=bias,
        mask=None if problem.mask is None else array("bool", *problem.mask),
        q_segments=integers(problem.segments, problem.q_len),
        k_segments=integers(problem.segments, problem.k_len),
        q_lengths=integers(problem.q_lengths),
        k_lengths=integers(problem.k_lengths),
        sinks=array("float32", problem.heads) if problem.sinks else None,
    )


def named_parts(problem: AttentionProblem) -> dict[str, Any]:
    """Returns the parts that differ from plain attention, for messages and reports."""
    sizes = {"batch", "q_len", "k_len", "heads", "kv_heads", "head_dim", "value_dim"}
    found = {}
    for item in fields(AttentionProblem):
        value = getattr(problem, item.name)
        if item.name not in sizes and value not in (None, False, 0):
            found[item.name] = value
    return found
