"""The backward half of "online" attention: tiles again, the scores computed anew.

With P = softmax(X) and delta = rowsum(P * dP), where dP = dout v^T, the gradient of
the scores is dX = P * (dP - delta) (Dao et al., arXiv 2205.14135). What the forward
half left about a row gives P of any tile by itself; what lies between q k^T and X is
differentiated by JAX, tile by tile, so any site is exact.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hlo_tools.composites import AttentionSpec, rows_with_keys
from hlo_tools.gradients import GradSpec
from pallas_kernels.attention import tiles
from pallas_kernels.attention.online_tiling import Blocks, KeyTile, QueryTile, Tiling

# With few keys one may have nearly all of the probability, and dP - delta cancels:
# then delta is summed over the same dP, which costs little in rows as short as this.
SHORT_ROW = 64


class _Whole(NamedTuple):
    """The operands, whole.

    Attributes:
      q, out, dout: [B,T,K,G,*].
      k, v: [B,K,S,*].
      sides: as they come.
      top, total: [B,K,G,T], maximum and sum of exponentials.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sides: tuple[jax.Array, ...]
    out: jax.Array
    top: jax.Array
    total: jax.Array
    dout: jax.Array


class _Rows(NamedTuple):
    """What of the operands belongs to one query block.

    Attributes:
      q: [pairs,rows,D], scaled.
      dout: [pairs,rows,Dv].
      top, log_total: [pairs,rows], maximum, and log of the sum of exponentials.
      delta: [pairs,rows]; None if a tile has whole rows, and can tell.
    """

    q: jax.Array
    dout: jax.Array
    top: jax.Array
    log_total: jax.Array
    delta: jax.Array | None


def online_attention_grads(
    spec: AttentionSpec,
    grad: GradSpec,
    blocks: Blocks,
    widen: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
) -> tuple[jax.Array, ...]:
    """Computes the gradients of attention tile by tile.

    Args:
      spec: the site.
      grad: what is wanted.
      blocks: the tile.
      widen: compute the products in `spec.compute_dtype`, see `product_dtypes`.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *rest: the sides [B|1,K|1,G|1,T|1,S|1] each, then what the forward half gave:
        its result [B,T,H,Dv], the maxima and sums [B,H,T]; then dout [B,T,H,Dv].

    Returns:
      The gradients in the order of `grad.wanted`, in `grad.dtypes`.
    """
    sides, (out, top, total, dout) = list(rest[:-4]), rest[-4:]
    for number in grad.sides:
        sides[number] = _varying_like(sides[number], q)
    backward = _Backward(spec, grad, blocks, widen)
    grouped = (spec.batch, spec.q_len, spec.kv_heads, spec.group, -1)
    row_shape = (spec.batch, spec.kv_heads, spec.group, spec.q_len)
    q, out, dout = (x.reshape(grouped) for x in (q, out, dout))
    top, total = (x.reshape(row_shape) for x in (top, total))
    of_all_values = None
    if backward.tiling.skips and not spec.rows_never_empty:
        seen = rows_with_keys(spec, *sides)  # [B|1,K|1,G|1,T]
        of_all_values = _of_empty_rows(spec, seen, dout)
        # To the tiles, which are not all of their keys, such rows do not exist.
        top, total = jnp.where(seen, top, 0), jnp.where(seen, total, 1)
        seen = jnp.transpose(seen, (0, 3, 1, 2))[..., None]
        out, dout = (jnp.where(seen, x, jnp.zeros_like(x)) for x in (out, dout))
    keys = jnp.transpose(k.astype(backward.score_operand), (0, 2, 1, 3))
    values = jnp.transpose(v.astype(backward.value_operand), (0, 2, 1, 3))
    found = backward(_Whole(q, keys, values, tuple(sides), out, top, total, dout))
    if of_all_values is not None and "v" in found:
        found["v"] = found["v"] + of_all_values[..., None]
    results = []
    for name, dtype in zip(grad.wanted, grad.dtypes, strict=True):
        array = found[name].astype(dtype)
        if name == "q":
            array = array.reshape(spec.batch, spec.q_len, spec.heads, spec.head_dim)
        results.append(array if isinstance(name, int) or name == "q" else _back(array))
    return tuple(results)


def _back(array: jax.Array) -> jax.Array:
    return jnp.transpose(array, (0, 3, 1, 2))  # [B,S,K,*]


def _varying_like(array: jax.Array, other: jax.Array) -> jax.Array:
    """Returns `array`, told apart by device under shard_map wherever `other` is.

    Otherwise JAX would sum its gradient over the devices, in every tile.
    """
    always = lax.full_like(other, True, bool, array.shape)  # XLA drops it again
    return jnp.where(always, array, jnp.zeros_like(array))


def _of_empty_rows(spec: AttentionSpec, seen: jax.Array, dout: jax.Array) -> jax.Array:
    """Returns what the rows that see no key give to the gradient of every value.

    Each of their probabilities is 1 / S with a finite `mask_fill`, and NaN with -inf;
    none of their scores is a product of q and k.

    Args:
      spec: the site.
      seen: bool [B|1,K|1,G|1,T], as of `rows_with_keys`.
      dout: [B,T,K,G,Dv].

    Returns:
      [B,K,Dv] in `spec.compute_dtype`.
    """
    dtype = spec.compute_dtype
    if math.isinf(spec.mask_fill or 0):
        some = jnp.any(~seen, axis=(2, 3))[..., None]  # [B|1,K|1,1]
        shape = (spec.batch, spec.kv_heads, spec.value_dim)
        return jnp.broadcast_to(jnp.where(some, jnp.nan, 0).astype(dtype), shape)
    share = jnp.asarray(1 / spec.k_len, spec.probs_dtype).astype(dtype)
    seen = jnp.transpose(seen, (0, 3, 1, 2))[..., None]  # [B|1,T,K|1,G|1,1]
    return jnp.where(seen, 0, dout.astype(dtype)).sum((1, 3)) * share


class _Backward:
    """Runs over all tiles of a site and adds up the gradients.

    Attributes:
      tiling: the tiles of the forward half.
      score_operand: dtype of the operands of the products with dX.
      value_operand: dtype of the operands of the products with dout.
    """

    def __init__(
        self, spec: AttentionSpec, grad: GradSpec, blocks: Blocks, widen: bool
    ):
        self.spec, self.grad, self.tiling = spec, grad, Tiling(spec, blocks, widen)
        self.score_operand, self.value_operand = (
            self.tiling.score_operand,
            self.tiling.value_operand,
        )
        if not widen:
            promote = jnp.promote_types
            self.score_operand = promote(self.score_operand, spec.score_dtype)
            self.value_operand = promote(self.value_operand, grad.dout_dtype)
        self.only_values = grad.wanted == ("v",)
        # rowsum(dout * out) is delta too, but only as exact as `out`.
        rounding = jnp.finfo(spec.out_dtype).eps, jnp.finfo(spec.probs_dtype).eps
        self.delta_from_probs = rounding[0] > rounding[1]
        # A tile of whole rows can sum P * dP itself, for one more pass over it.
        self.whole_rows = blocks.keys == spec.k_len and (
            self.delta_from_probs or spec.k_len <= SHORT_ROW
        )

    def __call__(self, whole: _Whole) -> dict[Any, jax.Array]:
        """Returns the gradients by name: q [B,T,K,G,D], k and v [B,K,*,S].

        That of q is rounded to its dtype already, the others are in
        `spec.compute_dtype`.
        """
        wanted = dict(zip(self.grad.wanted, self.grad.dtypes, strict=True))
        shapes: dict[Any, tuple[int, ...]] = {"q": whole.q.shape}
        shapes |= {number: side.shape for number, side in enumerate(whole.sides)}
        for name, array in (("k", whole.k), ("v", whole.v)):
            b, h, keys, depth = array.shape
            shapes[name] = (b, h, depth, keys)
        # full_like keeps what shard_map knows about dout
        zeros = tuple(
            lax.full_like(
                whole.dout,
                0,
                dtype if name == "q" else self.spec.compute_dtype,
                shapes[name],
            )
            for name, dtype in wanted.items()
        )

        def query_block(index, carry):
            sums = dict(zip(wanted, carry, strict=True))
            sums = self._query_block(whole, self.tiling.query_tile(index), sums)
            return tuple(sums[name] for name in wanted)

        result = lax.fori_loop(0, self.tiling.count, query_block, zeros)
        return dict(zip(wanted, result, strict=True))

    def _query_block(self, whole: _Whole, at: QueryTile, sums: dict) -> dict:
        """Adds what one query block gives to all sums, and fills in its own of q."""
        tiling, dtype = self.tiling, self.spec.compute_dtype
        names = [name for name in sums if name != "q"]
        rows = self._rows(whole, at)
        fresh = None
        if tiling.ragged_queries:  # a query of two blocks counts in the first only
            q_pos = at.t + lax.iota(jnp.int32, at.lead[3])
            fresh = jnp.broadcast_to(q_pos >= at.fresh, at.lead)
            fresh = fresh.reshape(rows.top.shape)
            rows = rows._replace(dout=jnp.where(fresh[..., None], rows.dout, 0))
            if rows.delta is not None:
                rows = rows._replace(delta=jnp.where(fresh, rows.delta, 0))

        columns = {
            "k": jnp.swapaxes(rows.q, 1, 2).astype(self.score_operand),
            "v": jnp.swapaxes(rows.dout, 1, 2).astype(self.value_operand),
        }  # [pairs,*,rows]

        def key_block(key: KeyTile, carry):
            dq, *others = carry
            terms = self._key_block(whole, rows, columns, at, key)
            added = [
                tiles.add_tile(total, *terms[name])
                for name, total in zip(names, others, strict=True)
            ]
            return dq + terms["q"] if "q" in sums else dq, *added

        shape = rows.q.shape if "q" in sums else ()
        dq = lax.full_like(rows.q, 0, dtype, shape)
        others = [sums[name] for name in names]
        dq, *others = tiling.over_keys(at, key_block, (dq, *others))
        sums = {**sums, **dict(zip(names, others, strict=True))}
        if "q" in sums:
            dq = (dq * jnp.asarray(tiling.q_scale, dtype)).astype(sums["q"].dtype)
            if fresh is not None:
                dq = jnp.where(fresh[..., None], dq, tiling.rows(at, sums["q"]))
            sums["q"] = tiling.put_rows(at, sums["q"], dq)
        return sums

    def _rows(self, whole: _Whole, at: QueryTile) -> _Rows:
        """Cuts a query block out of the operands, and works out its delta."""
        tiling, dtype = self.tiling, self.spec.compute_dtype
        q, dout = tiling.queries(at, whole.q), tiling.rows(at, whole.dout)
        place, pairs_rows = (at.b, at.h, 0, at.t), q.shape[:2]
        top, total = (
            tiles.slice_tile(x, place, at.lead).reshape(pairs_rows)
            for x in (whole.top, whole.total)
        )
        dout = dout.astype(dtype)
        rows = _Rows(q, dout, top, jnp.log(total), None)
        if self.only_values or self.whole_rows:
            return rows
        if not self.delta_from_probs:
            out = tiling.rows(at, whole.out).astype(dtype)
            return rows._replace(delta=(dout * out).sum(-1))

        def key_block(key: KeyTile, delta):
            probs, _ = self._probs(whole, rows, at, key)
            return delta + (probs * self._dprobs(whole, rows, at, key)).sum(-1)

        zero = lax.full_like(top, 0)
        return rows._replace(delta=tiling.over_keys(at, key_block, zero))

    def _probs(self, whole: _Whole, rows: _Rows, at: QueryTile, key: KeyTile):
        """Returns P [pairs,rows,s], and the function that takes dX to its causes."""
        tiling, compute = self.tiling, self.spec.compute_dtype
        k_tile = tiling.keys(at, key, whole.k).astype(tiling.score_operand)
        scores = tiling.product(0, rows.q, k_tile, (2, 2))
        place, size = tiling.side_place(at, key)
        parts = [tiles.side_tile(side, place, size) for side in whole.sides]

        def modified(scores, *chosen):
            mixed = list(parts)
            for number, side in zip(self.grad.sides, chosen, strict=True):
                mixed[number] = side
            return tiling.modified(at, key, scores, mixed)

        chosen = [parts[number] for number in self.grad.sides]
        # Sums over a tile are not taken in a narrow dtype, so not inside the vjp.
        wide = [x if x.dtype == compute else jnp.broadcast_to(x, size) for x in chosen]
        x, pull = jax.vjp(modified, scores.reshape(size), *wide)
        x = tiling.counted_once(key, x).reshape(scores.shape)
        # Two subtractions: a top of -1e30 plus the log would be -1e30 again.
        probs = jnp.exp(x - rows.top[..., None] - rows.log_total[..., None])

        def causes(dx):
            dscores, *dsides = pull(dx.reshape(size))
            summed = [
                _sum_to(d.astype(compute), side.shape)
                for d, side in zip(dsides, chosen, strict=True)
            ]
            return dscores.reshape(dx.shape), summed

        return probs, causes

    def _dprobs(self, whole: _Whole, rows: _Rows, at: QueryTile, key: KeyTile):
        dout = rows.dout.astype(self.value_operand)
        return self.tiling.product(1, dout, self.tiling.keys(at, key, whole.v), (2, 2))

    def _key_block(
        self,
        whole: _Whole,
        rows: _Rows,
        columns: dict[str, jax.Array],
        at: QueryTile,
        key: KeyTile,
    ) -> dict[Any, Any]:
        """Returns one tile's terms: that of q, of all others with their places.

        Those of k and v are [b,K,*,s]: a CPU takes half the time for the product of
        [D,rows] and [rows,s] that it takes with the tile on the left, transposed.
        """
        tiling, wanted = self.tiling, self.grad.wanted
        place, size = tiling.side_place(at, key)
        of_keys, key_size = (at.b, at.h, 0, key.s), (*size[:2], -1, size[4])
        probs, causes = self._probs(whole, rows, at, key)
        terms: dict[Any, Any] = {}
        if "v" in wanted:
            operand = probs.astype(self.value_operand)
            dv = tiling.product(1, columns["v"], operand, (2, 1))
            terms["v"] = dv.reshape(key_size), of_keys
        if self.only_values:
            return terms
        dprobs = self._dprobs(whole, rows, at, key)
        delta = rows.delta
        if delta is None:
            delta = (probs * dprobs).sum(-1)
        dscores, dsides = causes(probs * (dprobs - delta[..., None]))
        for number, dside in zip(self.grad.sides, dsides, strict=True):
            terms[number] = dside, place
        dscores = dscores.astype(self.score_operand)
        if "q" in wanted:
            k_tile = tiling.keys(at, key, whole.k)
            terms["q"] = tiling.product(0, dscores, k_tile, (2, 1))
        if "k" in wanted:
            dk = tiling.product(0, columns["k"], dscores, (2, 1))
            terms["k"] = dk.reshape(key_size), of_keys
        return terms


def _sum_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums [b,K,G,t,s] over the dims that have size 1 in `shape`."""
    pairs = zip(array.shape, shape, strict=True)
    axes = tuple(i for i, (have, want) in enumerate(pairs) if have != want)
    return array.sum(axes, keepdims=True) if axes else array
