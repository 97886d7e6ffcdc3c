"""The tiles of the backward half of "online" attention; see online_backward.py.

Each query block goes over its key blocks twice: the first sweep finds what each row
needs to know about itself, the second adds up the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hlo_tools.composites import AttentionSpec
from hlo_tools.gradients import GradSpec
from pallas_kernels.attention import tiles
from pallas_kernels.attention.online_backward_state import Kept, Rows, Whole
from pallas_kernels.attention.online_tiling import Blocks, KeyTile, QueryTile, Tiling

# dX of a row's top key is about P (1 - P) dP, and off by P * eps * dP from the rounding
# of delta: by less than 100 * eps of it if P is below this.
SATURATED_SHARE = 0.99


class Backward:
    """Runs over all tiles of a site and adds up the gradients.

    Attributes:
      tiling: the tiles.
      score_operand: dtype of the operands of the products with dX.
      value_operand: dtype of the operands of the products with dout.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        grad: GradSpec,
        blocks: Blocks,
        widen: bool,
        sweep: bool,
    ):
        self.spec, self.grad, self.tiling = spec, grad, Tiling(spec, blocks, widen)
        self.score_operand = self.tiling.score_operand
        self.value_operand = self.tiling.value_operand
        if not widen:
            promote = jnp.promote_types
            self.score_operand = promote(self.score_operand, spec.score_dtype)
            self.value_operand = promote(self.value_operand, grad.dout_dtype)
        self._only_values = grad.wanted == ("v",)
        self._sweep = sweep or self.tiling.one_key_block
        # Whether dX of a score depends on the score itself.
        self._bent_scores = not spec.named or spec.softcap is not None
        # rowsum(dout * out) is only as exact as `out`.
        rounding = jnp.finfo(spec.out_dtype).eps, jnp.finfo(spec.probs_dtype).eps
        self._out_is_coarse = rounding[0] > rounding[1]

    def __call__(self, whole: Whole) -> dict[Any, jax.Array]:
        """Returns the gradients by name: q [B,T,K,G,D], k and v [B,K,*,S].

        That of q is rounded to its dtype already, the others are in
        `spec.compute_dtype`.
        """
        tiling = self.tiling
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
            results, kept = carry
            sums, at = dict(zip(wanted, results, strict=True)), tiling.query_tile(index)
            sums, kept = self._query_block(whole, at, sums, kept)
            return tuple(sums[name] for name in wanted), kept

        # Room for one query block, made once: no block reads what another left.
        room = self._room(whole) if self._sweep and whole.delta is None else None
        carry = lax.fori_loop(0, tiling.count, query_block, (zeros, room))
        return dict(zip(wanted, carry[0], strict=True))

    def _room(self, whole: Whole) -> Kept:
        tiling = self.tiling
        pairs = tiling.blocks.batch * tiling.blocks.kv_heads
        lead = (tiling.key_block_count, pairs, self.spec.group * tiling.blocks.queries)
        tile = (*lead, tiling.blocks.keys)
        shapes = (
            tile,
            lead,
            () if self._only_values else tile,
            tile if self._bent_scores else (),
        )
        dtype = self.spec.compute_dtype
        return Kept(*(lax.full_like(whole.dout, 0, dtype, shape) for shape in shapes))

    def _query_block(
        self, whole: Whole, at: QueryTile, sums: dict, kept: Kept | None
    ) -> tuple[dict, Kept | None]:
        """Adds what one query block gives to all sums, and fills in its own of q."""
        tiling, dtype = self.tiling, self.spec.compute_dtype
        names = [name for name in sums if name != "q"]
        q, dout = tiling.queries(at, whole.q), tiling.rows(at, whole.dout)
        dout, fresh = dout.astype(dtype), None
        if tiling.ragged_queries:  # a query of two blocks counts in the first only
            q_pos = at.t + lax.iota(jnp.int32, at.lead[3])
            fresh = jnp.broadcast_to(q_pos >= at.fresh, at.lead)
            fresh = fresh.reshape(q.shape[:2])[..., None]
            dout = jnp.where(fresh, dout, 0)
        if kept is None:
            rows = self._given(whole, at, q, dout)
            if fresh is not None and rows.delta is not None:
                rows = rows._replace(delta=jnp.where(fresh[..., 0], rows.delta, 0))
        else:
            rows = self._swept(whole, at, q, dout, kept)
        columns = {
            "k": jnp.swapaxes(q, 1, 2).astype(self.score_operand),
            "v": jnp.swapaxes(dout, 1, 2).astype(self.value_operand),
        }  # [pairs,*,rows]

        def key_block(key: KeyTile, carry):
            dq, *others = carry
            terms = self._key_block(whole, rows, columns, at, key)
            added = [
                tiles.add_tile(total, *terms[name])
                for name, total in zip(names, others, strict=True)
            ]
            return dq + terms["q"] if "q" in sums else dq, *added

        dq = lax.full_like(q, 0, dtype, q.shape if "q" in sums else ())
        others = [sums[name] for name in names]
        dq, *others = tiling.over_keys(at, key_block, (dq, *others))
        sums = {**sums, **dict(zip(names, others, strict=True))}
        if "q" in sums:
            dq = (dq * jnp.asarray(tiling.q_scale, dtype)).astype(sums["q"].dtype)
            if fresh is not None:
                dq = jnp.where(fresh, dq, tiling.rows(at, sums["q"]))
            sums["q"] = tiling.put_rows(at, sums["q"], dq)
        return sums, rows.kept

    def _swept(
        self, whole: Whole, at: QueryTile, q: jax.Array, dout: jax.Array, kept: Kept
    ) -> Rows:
        """Finds out about the rows from the very scores that the gradients are of.

        Where a row has nearly all of its probability at one key, delta is dP of that
        key, and what the others add to it, all that dX is made of, is lost: `rest`.
        """
        tiling, dtype = self.tiling, self.spec.compute_dtype
        zero = lax.full_like(q, 0, dtype, q.shape[:2])

        def key_block(key: KeyTile, carry):
            top, total, delta, kept = carry
            scores = self._scores(whole, q, at, key)
            x, _ = self._modified(whole, at, key, scores)
            new_top = jnp.maximum(top, x.max(-1))
            # While all scores of a row are -inf, -inf - -inf would make it NaN.
            safe_top = jnp.where(new_top == -jnp.inf, 0, new_top)
            exps, decay = jnp.exp(x - safe_top[..., None]), jnp.exp(top - safe_top)
            total, dprobs = total * decay + exps.sum(-1), zero
            if not self._only_values:
                dprobs = self._dprobs(whole, dout, at, key)
                delta = delta * decay + (exps * dprobs).sum(-1)
            tile = Kept(exps, new_top, dprobs, scores)
            return new_top, total, delta, kept.put(tile, key.number)

        carry = lax.full_like(zero, -jnp.inf), zero, zero, kept
        top, total, delta, kept = tiling.over_keys(at, key_block, carry)
        if tiling.skips:  # rows that see no key are none of the tiles' business
            top, total = jnp.where(total == 0, 0, top), jnp.where(total == 0, 1, total)
        share = 1 / total
        mean = delta * share
        rows = Rows(q, dout, top, share, mean, None, kept)
        if self._only_values or tiling.one_key_block:
            return rows

        def add_rest(key: KeyTile, rest):
            tile = kept.of(key)
            found = (tile.exps * (tile.dprobs - mean[..., None])).sum(-1)
            return rest + jnp.exp(tile.top - top) * share * found

        find = functools.partial(tiling.over_keys, at, add_rest)
        needed = jnp.any(share > SATURATED_SHARE)  # one more look at each tile
        return rows._replace(rest=lax.cond(needed, find, lambda rest: rest, zero))

    def _given(
        self, whole: Whole, at: QueryTile, q: jax.Array, dout: jax.Array
    ) -> Rows:
        """Takes what the forward half knew of the rows: keeps no tile."""
        tiling, dtype = self.tiling, self.spec.compute_dtype
        place = (at.b, at.h, 0, at.t)
        top, total = (
            tiles.slice_tile(x, place, at.lead).reshape(q.shape[:2])
            for x in (whole.top, whole.total)
        )
        rows = Rows(q, dout, top, 1 / total, None)
        if self._only_values:
            return rows
        if whole.delta is not None:
            delta = tiles.slice_tile(whole.delta, place, at.lead)
            return rows._replace(delta=delta.reshape(top.shape))
        if not self._out_is_coarse:
            out = tiling.rows(at, whole.out).astype(dtype)
            return rows._replace(delta=(dout * out).sum(-1))

        def key_block(key: KeyTile, delta):
            probs, dprobs, _ = self._probs(whole, rows, at, key)
            return delta + (probs * dprobs).sum(-1)

        zero = lax.full_like(top, 0)
        return rows._replace(delta=tiling.over_keys(at, key_block, zero))

    def _scores(self, whole: Whole, q: jax.Array, at: QueryTile, key: KeyTile):
        """Returns the score product of a tile, [pairs,rows,s]."""
        k_tile = self.tiling.keys(at, key, whole.k).astype(self.tiling.score_operand)
        return self.tiling.product(0, q, k_tile, (2, 2))

    def _dprobs(self, whole: Whole, dout: jax.Array, at: QueryTile, key: KeyTile):
        """Returns dP of a tile, [pairs,rows,s]."""
        v_tile = self.tiling.keys(at, key, whole.v)
        dout = dout.astype(self.value_operand)
        return self.tiling.product(1, dout, v_tile, (2, 2))

    def _modified(
        self, whole: Whole, at: QueryTile, key: KeyTile, scores: jax.Array
    ) -> tuple[jax.Array, Callable]:
        """Returns X [pairs,rows,s], and the function that takes dX to its causes."""
        tiling, compute = self.tiling, self.spec.compute_dtype
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

        def causes(dx):
            dscores, *dsides = pull(dx.reshape(size))
            summed = [
                _sum_to(d.astype(compute), side.shape)
                for d, side in zip(dsides, chosen, strict=True)
            ]
            return dscores.reshape(dx.shape), summed

        return tiling.counted_once(key, x).reshape(scores.shape), causes

    def _probs(
        self, whole: Whole, rows: Rows, at: QueryTile, key: KeyTile
    ) -> tuple[jax.Array, jax.Array, Callable]:
        """Returns P and dP [pairs,rows,s], and what takes dX to its causes."""
        if rows.kept is None:
            scores = self._scores(whole, rows.q, at, key)
            x, causes = self._modified(whole, at, key, scores)
            # Not exp(x - top - log(total)): a probability of 1/2 would not be exact.
            probs = jnp.exp(x - rows.top[..., None]) * rows.share[..., None]
            return probs, self._dprobs(whole, rows.dout, at, key), causes
        exps, top, dprobs, scores = rows.kept.of(key)
        scores = jnp.broadcast_to(scores, exps.shape)
        _, causes = self._modified(whole, at, key, scores)
        share = jnp.exp(top - rows.top) * rows.share
        return exps * share[..., None], dprobs, causes

    def _key_block(
        self,
        whole: Whole,
        rows: Rows,
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
        probs, dprobs, causes = self._probs(whole, rows, at, key)
        terms: dict[Any, Any] = {}
        if "v" in wanted:
            operand = probs.astype(self.value_operand)
            dv = tiling.product(1, columns["v"], operand, (2, 1))
            terms["v"] = dv.reshape(key_size), of_keys
        if rows.delta is None or self._only_values:
            return terms
        centered = dprobs - rows.delta[..., None]
        if tiling.one_key_block and whole.delta is None:  # XLA fuses it here
            centered -= (probs * centered).sum(-1, keepdims=True)
        elif rows.rest is not None:
            centered -= rows.rest[..., None]
        dscores, dsides = causes(probs * centered)
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
