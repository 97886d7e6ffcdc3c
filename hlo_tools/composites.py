"""The contract of the composites: operands, attributes, and what they compute.

An outlined site is a `stablehlo.composite` whose decomposition is the program's own
operations. `AttentionSpec` is what was proven about such a site; it is all that an
`Implementation` gets to see, and `attention_ref` says in plain JAX what it means.

Shapes: B batch, T query length, S key length, H query heads, K key-value heads,
G query heads per key-value head (H = K * G, head h belongs to key-value head
h // G), D head dim, Dv value dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from hlo_tools.gradients import GradImplementation
    from hlo_tools.targets import Target

# A masked score of at most this has probability zero beside any real score:
# float32 exp is 0 below -104, so a visible score would have to be under -9896.
NEGLIGIBLE_FILL = -1e4
# Limits of a guarded site: a visible key has a bias of at least LOWEST_BIAS, no key
# one above HIGHEST_BIAS, and every mask lowers or fills by GUARDED_FILL or more. So a
# hidden key stays 4e4 below a visible one whether the bias is added to the fill or
# not, which scores within +-9900 can not make up for; and all of it is in float16. A
# larger bias would round the scores otherwise than in the order that the site has.
LOWEST_BIAS, HIGHEST_BIAS, GUARDED_FILL = -1e3, 1e3, -5e4


@dataclass(frozen=True)
class SideSpec:
    """A side operand of the scores: a mask, a bias, lengths, positions.

    Attributes:
      shape: [B|1, K|1, G|1, T|1, S|1].
      dtype: name, e.g. "bool".
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention site computes, whatever its spelling.

        P = softmax(X), out = P @ v
        X = where(visible & mask, softcap(scale * q @ k^T) + bias, mask_fill)

    Key j is visible to query i iff lo <= j - (i + offset) <= hi, where causal gives
    hi = 0 and window = (left, right) gives lo = -left, hi = right.

    Attributes:
      batch, q_len, k_len, kv_heads, group, head_dim, value_dim: B, T, S, K, G, D, Dv.
      q_dtype, k_dtype, v_dtype: of the operands.
      score_dtype: of the result of the score product.
      softmax_dtype: that the softmax is computed in.
      probs_dtype: of the probabilities at the value product.
      out_dtype: of the result.
      precision: of the two products, "DEFAULT", "HIGH" or "HIGHEST".
      scale: factor of the scores.
      softcap: c of c * tanh(x / c), or None.
      causal: no key after i + offset.
      window: (left, right), None on a side for no limit there; or None.
      offset: position of query 0 among the keys.
      has_bias: `bias_fn` gives a term.
      bias_dtype: one that holds the bias exactly, in the original's own rounding;
        None without a bias.
      has_mask: `mask_fn` gives a mask.
      mask_fill: the score where a key is masked or not visible.
      named: the fields above say all about X. Otherwise only `score_mod` is exact.
      guarded: they are proven only for inputs where every query sees a key whose
        bias is not mask-like; otherwise `exact_mod` says what the site computes.
      rows_never_empty: proven that every query sees a key. A row that sees none is
        the average of all v if `mask_fill` is finite, and NaN if it is -inf.
      sides: the side operands, in order.
      score_mod: function of (scores [b,K,G,t,s], sides, q_pos int32 [t], k_pos int32
        [s]) -> X, on any tile, with the sides sliced to it, in the dtype of `scores`.
        None is allowed when `named`: the fields are used.
      exact_mod: the same, exact for any inputs; None unless `guarded`.
      bias_fn: function of (sides, q_pos, k_pos) -> rank 5, broadcastable to the tile.
      mask_fn: the same, bool, without the causal and window part.
    """

    batch: int
    q_len: int
    k_len: int
    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    q_dtype: str
    k_dtype: str
    v_dtype: str
    score_dtype: str
    softmax_dtype: str
    probs_dtype: str
    out_dtype: str
    precision: tuple[str, str] = ("DEFAULT", "DEFAULT")
    scale: float = 1.0
    softcap: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    offset: int = 0
    has_bias: bool = False
    bias_dtype: str | None = None
    has_mask: bool = False
    mask_fill: float | None = None
    named: bool = True
    guarded: bool = False
    rows_never_empty: bool = True
    sides: tuple[SideSpec, ...] = ()
    score_mod: Any = None
    exact_mod: Any = None
    bias_fn: Any = None
    mask_fn: Any = None

    @property
    def heads(self) -> int:
        """H, the number of query heads."""
        return self.kv_heads * self.group

    @property
    def score_count(self) -> int:
        """B * H * T * S."""
        return self.batch * self.heads * self.q_len * self.k_len

    @property
    def compute_dtype(self) -> jnp.dtype:
        """float64 if any part of the site is, else float32."""
        parts = (self.q_dtype, self.k_dtype, self.v_dtype, self.score_dtype)
        wide = "float64" in (*parts, self.softmax_dtype, self.probs_dtype)
        return jnp.dtype("float64" if wide else "float32")

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(lo, hi): key j is visible to query i iff lo <= j - i <= hi.

        None where there is no limit; both None when the site is not `named`.
        """
        if not self.named:
            return None, None
        left, right = self.window or (None, None)
        low = None if left is None else self.offset - left
        limits = [right] if right is not None else []
        limits += [0] if self.causal else []
        return low, self.offset + min(limits) if limits else None

    @property
    def masks_are_negligible(self) -> bool:
        """Whether a masked key has probability zero in a row that sees a key."""
        return self.mask_fill is None or self.mask_fill <= NEGLIGIBLE_FILL


@dataclass(frozen=True)
class Implementation:
    """One way to run a composite's sites.

    Attributes:
      name: as in the table of implementations.
      platforms: of "cpu", "gpu", "tpu".
      supports: (spec, target) -> None, or the reason why it can not run.
      seconds: (spec, target) -> predicted time of one execution.
      temp_bytes: (spec, target) -> memory it takes beside operands and result.
      config: (spec, target) -> its choices (block sizes ...), for the report.
      build: (spec, target) -> function of q [B,T,H,D], k [B,S,K,D], v [B,S,K,Dv]
        and the sides, returning [B,T,H,Dv] in `spec.out_dtype`.
      grad: how it runs together with the backward pass; None if it can not.
    """

    name: str
    platforms: tuple[str, ...]
    supports: Callable[[AttentionSpec, Target], str | None]
    seconds: Callable[[AttentionSpec, Target], float]
    temp_bytes: Callable[[AttentionSpec, Target], int]
    config: Callable[[AttentionSpec, Target], dict[str, Any]]
    build: Callable[[AttentionSpec, Target], Callable]
    grad: GradImplementation | None = None


@dataclass(frozen=True)
class Composite:
    """The documentation of one composite.

    Attributes:
      summary: one line.
      operands: name -> shape and meaning, in order.
      results: the same.
      attributes: name -> meaning.
      reference: "module:function" of the reference in plain JAX.
    """

    summary: str
    operands: dict[str, str]
    results: dict[str, str]
    attributes: dict[str, str]
    reference: str


COMPOSITES: dict[str, Composite] = {
    "hlo_tools.attention": Composite(
        summary="softmax(scores(q k^T)) v over one index space",
        operands={
            "q, k, v": "in the program's own layout and dtype",
            "sides": "the other values that the scores depend on",
        },
        results={"out": "in the program's own layout and dtype"},
        attributes={
            "batch": "B, the product of all batch dims",
            "q_len": "T, queries of one batch element and head",
            "k_len": "S, keys",
            "heads": "H, query heads",
            "kv_heads": "K, key-value heads; H is a multiple of it",
            "head_dim": "D, contracted by the score product",
            "value_dim": "Dv, last dim of the result",
            "dtype": "of q",
            "named": "whether the attributes say all about the scores",
            "guarded": "whether they do only if every query sees a key, which is "
            "checked at run time; absent if not",
            "scale": "factor of the scores",
            "softcap": "c of c * tanh(x / c); absent without one",
            "causal": "key j is visible to query i only if j <= i + offset",
            "window_left": "only if j >= i + offset - window_left; absent without",
            "window_right": "only if j <= i + offset + window_right; absent without",
            "offset": "position of query 0 among the keys",
            "has_bias": "whether a side is added to the scores",
            "has_mask": "whether a side masks keys",
            "mask_fill": "the score of a masked key; absent without masks",
        },
        reference="hlo_tools.composites:attention_ref",
    )
}


def visible_keys(
    spec: AttentionSpec, q_pos: jax.Array, k_pos: jax.Array
) -> jax.Array | None:
    """Returns which keys the causal and window limits leave.

    Args:
      spec: a named site.
      q_pos: int32 [t].
      k_pos: int32 [s].

    Returns:
      bool [t, s], or None if there is no limit.
    """
    low, high = spec.band
    distance = k_pos[None, :] - q_pos[:, None]  # [t, s]
    checks = [] if low is None else [distance >= low]
    checks += [] if high is None else [distance <= high]
    return functools.reduce(jnp.logical_and, checks) if checks else None


def modified_scores(
    spec: AttentionSpec,
    scores: jax.Array,
    sides: tuple[jax.Array, ...],
    q_pos: jax.Array,
    k_pos: jax.Array,
) -> jax.Array:
    """Returns what the softmax is applied to, X, from the score product.

    Args:
      spec: the site.
      scores: [b,K,G,t,s], q k^T of a tile.
      sides: sliced to the tile.
      q_pos: int32 [t], the tile's query positions.
      k_pos: int32 [s], its key positions.

    Returns:
      [b,K,G,t,s], in the dtype of `scores`.
    """
    exact = spec.exact_mod if spec.guarded else spec.score_mod
    if exact is not None:
        return exact(scores, sides, q_pos, k_pos)
    dtype = scores.dtype
    x = scores * jnp.asarray(spec.scale, dtype)
    if spec.softcap is not None:
        cap = jnp.asarray(spec.softcap, dtype)
        x = cap * jnp.tanh(x / cap)
    if spec.has_bias:
        x = x + spec.bias_fn(sides, q_pos, k_pos).astype(dtype)
    keep = visible_keys(spec, q_pos, k_pos)
    if spec.has_mask:
        mask = spec.mask_fn(sides, q_pos, k_pos)
        keep = mask if keep is None else keep & mask
    return x if keep is None else jnp.where(keep, x, jnp.asarray(spec.mask_fill, dtype))


def attention_ref(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, *sides: jax.Array
) -> jax.Array:
    """Computes a site in the plainest way, with all scores in memory.

    Args:
      spec: the site.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *sides: [B|1,K|1,G|1,T|1,S|1] each.

    Returns:
      [B,T,H,Dv] in float32, or float64 if any of q, k, v is.
    """
    dtype = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    q = q.reshape(*q.shape[:2], spec.kv_heads, spec.group, q.shape[-1])
    einsum = functools.partial(jnp.einsum, precision="highest")
    scores = einsum("btkgd,bskd->bkgts", q, k)
    q_pos, k_pos = (jnp.arange(n, dtype=jnp.int32) for n in (q.shape[1], k.shape[1]))
    x = modified_scores(spec, scores, sides, q_pos, k_pos)
    probs = jax.nn.softmax(x, axis=-1)
    out = einsum("bkgts,bskd->btkgd", probs, v)
    return out.reshape(*out.shape[:2], spec.heads, out.shape[-1])


def rows_with_keys(spec: AttentionSpec, *sides: jax.Array) -> jax.Array:
    """Returns which queries see at least one key.

    Args:
      spec: a named site.
      *sides: its side operands, whole.

    Returns:
      bool [B|1,K|1,G|1,T].
    """
    q_pos = jnp.arange(spec.q_len, dtype=jnp.int32)
    k_pos = jnp.arange(spec.k_len, dtype=jnp.int32)
    keep = visible_keys(spec, q_pos, k_pos)
    if spec.has_mask:
        mask = spec.mask_fn(sides, q_pos, k_pos)
        keep = mask if keep is None else keep & mask
    if keep is None:
        return jnp.ones((1, 1, 1, spec.q_len), bool)
    keep = keep.reshape((1,) * (5 - keep.ndim) + keep.shape)
    return jnp.broadcast_to(keep.any(-1), (*keep.shape[:3], spec.q_len))


def fix_empty_rows(
    spec: AttentionSpec, out: jax.Array, v: jax.Array, *sides: jax.Array
) -> jax.Array:
    """Gives the queries that see no key the result that the site gives them.

    A softmax over equal scores is uniform, so with a finite `mask_fill` that is the
    average of all values, hidden ones included; with -inf it is NaN. Kernels leave
    something else there.

    Args:
      spec: a named site; returned as it is if `rows_never_empty`.
      out: [B,T,H,Dv].
      v: [B,S,K,Dv].
      *sides: the side operands.

    Returns:
      `out`, corrected.
    """
    if spec.rows_never_empty or spec.mask_fill is None:
        return out
    seen = rows_with_keys(spec, *sides)  # [B|1,K|1,G|1,T]
    if math.isinf(spec.mask_fill):
        average = jnp.full((1, 1, 1, 1, 1), jnp.nan, out.dtype)
    else:
        # As the site does: each probability is 1 / S, rounded to its dtype.
        share = jnp.asarray(1 / spec.k_len, spec.probs_dtype).astype(spec.compute_dtype)
        average = v.astype(spec.compute_dtype).sum(1) * share  # [B,K,Dv]
        average = average.astype(out.dtype)[:, None, :, None, :]
    grouped = out.reshape(*out.shape[:2], spec.kv_heads, spec.group, out.shape[-1])
    seen = jnp.transpose(seen, (0, 3, 1, 2))[..., None]  # [B|1,T,K|1,G|1,1]
    return jnp.where(seen, grouped, average).reshape(out.shape)
