"""What benchmarks/attention.py measures: shapes, features, and their random arrays."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]

# Of the keys that a random mask leaves visible.
VISIBLE_SHARE = 0.9
# What FlashAttention's benchmarks count a backward pass as, in forward passes.
BACKWARD_FORWARDS = 2.5


@dataclass(frozen=True)
class Row:
    """One case: T = S, and everything that differs from plain attention.

    Attributes:
      name: as the table has it.
      batch, length, heads, kv_heads, depth: B, T = S, H, K, D.
      dtype: of all arrays but masks and segments.
      causal: no key after the query.
      window: how many keys before its own position a query sees, or None; the rows
        that have one are causal.
      softcap: c of c * tanh(score / c), or None.
      bias: whether a bias [1,H,T,S] is added.
      bias_gradient: whether its gradient is wanted too.
      mask: "full" for a mask [B,1,T,S], "keys" for [B,1,1,S], or None.
      segments: how many there are, of equal length; 0 for none.
    """

    name: str
    batch: int = 2
    length: int = 4096
    heads: int = 16
    kv_heads: int = 16
    depth: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    bias: bool = False
    bias_gradient: bool = False
    mask: str | None = None
    segments: int = 0

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The arrays whose gradients are wanted."""
        return ("q", "k", "v", "bias") if self.bias_gradient else ("q", "k", "v")

    def operations(self, part: str) -> float:
        """Returns the floating point operations of a call, by convention.

        4 B H T S D forward, half of it if causal, 3.5 times that with the backward
        pass. Masks, windows and segments are not subtracted.

        Args:
          part: "forward" or "both".
        """
        count = 4.0 * self.batch * self.heads * self.length**2 * self.depth
        count *= 0.5 if self.causal else 1.0
        return count * (1 + BACKWARD_FORWARDS) if part == "both" else count


def _shape(batch: int, length: int, heads: int, depth: int) -> tuple[Row, ...]:
    sizes = dict(batch=batch, length=length, heads=heads, kv_heads=heads, depth=depth)
    name = f"D{depth} B{batch} S{length} H{heads}"
    return Row(f"{name} full", **sizes), Row(f"{name} causal", causal=True, **sizes)


MAIN: tuple[Row, ...] = (
    *_shape(2, 8192, 16, 128),
    *_shape(4, 2048, 16, 128),
    *_shape(4, 4096, 16, 64),
    *_shape(2, 4096, 8, 256),
)
# All of (B, S, H, D) = (2, 4096, 16, 128), unless the name says otherwise.
FEATURES: tuple[Row, ...] = (
    Row("mask", mask="full"),
    Row("key mask", mask="keys"),
    Row("segments causal", segments=4, causal=True),
    Row("bias", bias=True),
    Row("bias + dbias", bias=True, bias_gradient=True),
    Row("grouped K4 causal", kv_heads=4, causal=True),
    Row("window 512 causal", window=511, causal=True),
    Row("softcap causal", softcap=30.0, causal=True),
    Row("D96 causal", depth=96, causal=True),
    Row("float16 causal", dtype="float16", causal=True),
    Row("S1000", length=1000),
    Row("S1000 causal", length=1000, causal=True),
)


def small(row: Row) -> Row:
    """Returns a row with its features and sizes that a CPU does at once."""
    return dataclasses.replace(
        row,
        name=f"{row.name}, small",
        batch=2,
        length=75 if row.length % 64 else 128,
        heads=4,
        kv_heads=4 * row.kv_heads // row.heads,
        depth=row.depth // 4,
        window=None if row.window is None else 20,
    )


def shapes(row: Row) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what `arrays` makes for a row, without the contents."""
    return jax.eval_shape(lambda: arrays(row, 0))


def arrays(row: Row, seed: Any) -> Arrays:
    """Returns random arrays for a row; can be traced.

    Args:
      row: the case.
      seed: an integer.

    Returns:
      q [B,T,H,D], k and v [B,S,K,D], dout [B,T,H,D]; and those that the row has of
      bias [1,H,T,S], mask (bool, as `Row.mask`) and segments (int32 [B,S]).
    """
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    queries = (row.batch, row.length, row.heads, row.depth)
    stored = (row.batch, row.length, row.kv_heads, row.depth)
    parts = {"q": queries, "k": stored, "v": stored, "dout": queries}
    if row.bias:
        parts["bias"] = (1, row.heads, row.length, row.length)
    found = {
        name: jax.random.normal(next(keys), shape, row.dtype)
        for name, shape in parts.items()
    }
    if row.mask:
        rows = row.length if row.mask == "full" else 1
        shape = (row.batch, 1, rows, row.length)
        found["mask"] = jax.random.bernoulli(next(keys), VISIBLE_SHARE, shape)
    if row.segments:
        ids = jnp.arange(row.length, dtype=jnp.int32) * row.segments // row.length
        found["segments"] = jnp.broadcast_to(ids, (row.batch, row.length))
    return found
