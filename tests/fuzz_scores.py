"""From q and k to what the softmax sees: scales, norms, biases, masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_case import Case
from fuzz_labels import Labelled, contract, moved, spread

Sides = Mapping[str, Labelled]


# ------------------------------------------------------------- before the product


def _scaled(x: Labelled, factor) -> Labelled:
    return x.with_array(x.array * factor)


def normalized(case: Case, x: Labelled, sides: Sides) -> Labelled:
    """Applies the norm of queries and keys."""
    if case.norm == "none":
        return x
    square = (x.array * x.array).sum(x.axis("d"), keepdims=True)
    if case.norm == "l2":
        return _scaled(x, jax.lax.rsqrt(square + 1e-6))
    out = _scaled(x, jax.lax.rsqrt(square / x.size("d") + 1e-5))
    if case.norm == "rms_gain":
        out = _scaled(out, spread(sides["gain"], out.labels))
    return out


def scaled_operands(case: Case, q: Labelled, k: Labelled) -> tuple[Labelled, Labelled]:
    """Applies the part of the scale that goes before the product."""
    root = q.size("d") ** 0.5
    if case.scale in ("on_q", "twice"):
        q = _scaled(q, 1 / root)
    elif case.scale == "q_divided":
        q = q.with_array(q.array / root)
    elif case.scale == "on_k":
        k = _scaled(k, 1 / root)
    elif case.scale == "split":
        q, k = _scaled(q, root**-0.5), _scaled(k, root**-0.5)
    return q, k


def scaled_scores(case: Case, x: Labelled, sides: Sides, root: float) -> Labelled:
    """Applies the part of the scale that goes after the product."""
    if case.scale == "multiplied":
        return _scaled(x, 1 / root)
    if case.scale == "divided":
        return x.with_array(x.array / jnp.sqrt(jnp.asarray(root**2, x.array.dtype)))
    if case.scale == "negative":
        return _scaled(x, -0.3)
    if case.scale == "twice":
        return _scaled(x, 0.5)
    if case.scale == "learned":
        return _scaled(x, spread(sides["scale"], x.labels))
    if case.scale == "temperature":
        return _scaled(x, spread(sides["temperature"], x.labels))
    if case.scale == "temperature_divided":
        return x.with_array(x.array / spread(sides["temperature"], x.labels))
    return x


# --------------------------------------------------------------- score functions

FUNCTIONS: dict[str, Callable] = {
    "none": lambda x: x,
    "softcap": lambda x: 2.5 * jnp.tanh(x / 2.5),
    "sine": lambda x: jnp.sin(x),
    "square": lambda x: x * x * 0.5,
    "relu": lambda x: jax.nn.relu(x) + 0.1 * x,
    "clip": lambda x: jnp.clip(x, -1.0, 1.5),
    "polynomial": lambda x: x + 0.25 * x * x - 0.1,
    "absolute": lambda x: -jnp.abs(x),
}


def _function(case: Case, x: Labelled, sides: Sides) -> Labelled:
    if case.function == "learned_softcap":
        cap = spread(sides["cap"], x.labels)
        return x.with_array(cap * jnp.tanh(x.array / cap))
    return x.with_array(FUNCTIONS[case.function](x.array))


# ------------------------------------------------------------------------ biases


def _positions(x: Labelled) -> tuple[Labelled, Labelled]:
    t, s = jnp.arange(x.size("t")), jnp.arange(x.size("s"))
    return Labelled(t, "t"), Labelled(s, "s")


def _distance(x: Labelled) -> Labelled:
    """int [t, s]: query position - key position."""
    i, j = _positions(x)
    return Labelled(i.array[:, None] - j.array[None, :], "ts")


def biased(case: Case, x: Labelled, sides: Sides) -> Labelled:
    """Adds the bias."""
    if case.bias == "none":
        return x
    dtype = x.array.dtype
    distance = _distance(x)
    if case.bias in ("alibi", "alibi_constant"):
        away = Labelled(-jnp.abs(distance.array).astype(dtype), "ts")
        slopes = sides["slopes"]
        term = spread(slopes, x.labels) * spread(away, x.labels)
    elif case.bias == "t5":
        bucket = jnp.clip(distance.array, -2, 2) + 2
        heads = sides["table"].labels.replace("r", "")
        table = moved(sides["table"], "r" + heads)
        rows = Labelled(table.array[bucket], "ts" + heads)
        term = spread(rows, x.labels)
    elif case.bias == "distance":
        logs = jnp.log1p(jnp.abs(distance.array).astype(dtype))
        term = -0.5 * spread(Labelled(logs, "ts"), x.labels)
    else:
        term = spread(sides["bias"], x.labels)
    return x.with_array(x.array + term.astype(dtype))


# ------------------------------------------------------------------------- masks


def _constant(x: Labelled, function: Callable) -> Labelled:
    """A mask that is a constant of the program."""
    i, j = np.arange(x.size("t"))[:, None], np.arange(x.size("s"))[None, :]
    return Labelled(
        jnp.asarray(np.broadcast_to(function(i, j), (i.size, j.size))), "ts"
    )


def _by_position(x: Labelled, function: Callable) -> Labelled:
    i, j = _positions(x)
    return Labelled(function(i.array[:, None], j.array[None, :]), "ts")


def _tril(x: Labelled) -> Labelled:
    return Labelled(jnp.tril(jnp.ones((x.size("t"), x.size("s")), bool)), "ts")


def _offset(x: Labelled) -> Labelled:
    t, s = x.size("t"), x.size("s")
    return Labelled(jnp.tril(jnp.ones((t, s), bool), k=s - t), "ts")


def _lengths(x: Labelled, sides: Sides) -> Labelled:
    lengths = sides["lengths"]
    keys = Labelled(jnp.arange(x.size("s")), "s")
    order = lengths.labels + "s"
    return Labelled(spread(keys, order) < spread(lengths, order), order)


def _segments(x: Labelled, sides: Sides) -> Labelled:
    left, right = sides["q_segments"], sides["k_segments"]
    order = left.labels.replace("t", "") + "ts"
    return Labelled(spread(left, order) == spread(right, order), order)


def _both(one: Labelled, two: Labelled) -> Labelled:
    order = "".join(sorted({*one.labels, *two.labels} - {*"ts"})) + "ts"
    return Labelled(spread(one, order) & spread(two, order), order)


MASKS: dict[str, Callable[[Labelled, Sides], Labelled]] = {
    "causal_tril": lambda x, _: _tril(x),
    "causal_iota": lambda x, _: _by_position(x, lambda i, j: j <= i),
    "causal_constant": lambda x, _: _constant(x, lambda i, j: i >= j),
    "causal_offset": lambda x, _: _offset(x),
    "causal_late": lambda x, _: _by_position(x, lambda i, j: i > j),
    "window": lambda x, _: _by_position(x, lambda i, j: (j <= i) & (i - j < 3)),
    "band": lambda x, _: _by_position(x, lambda i, j: jnp.abs(i - j) <= 2),
    "prefix": lambda x, _: _by_position(x, lambda i, j: (j <= i) | (j < 2)),
    "strided": lambda x, _: _by_position(x, lambda i, j: (i - j) % 2 == 0),
    "blocks": lambda x, _: _constant(x, lambda i, j: i // 2 == j // 2),
    "lengths": _lengths,
    "segments": _segments,
    "valid": lambda x, sides: sides["valid"],
    "dense": lambda x, sides: sides["dense"],
    "dense_full": lambda x, sides: sides["dense"],
    "dense_heads": lambda x, sides: sides["dense"],
    "sparse_rows": lambda x, sides: sides["dense"],
    "causal_and_valid": lambda x, sides: _both(_tril(x), sides["valid"]),
}


def fill_of(case: Case) -> float:
    """Returns the score of a masked key: the same in the float64 reference."""
    if case.fill != "min":
        return float(case.fill)
    wide = case.narrow and case.score_dtype != "same"
    return float(jnp.finfo("float32" if wide else case.dtype).min)


def masked(case: Case, x: Labelled, keep: Labelled, form: str) -> Labelled:
    """Applies one mask, in one of the ways people do."""
    dtype = x.array.dtype
    fill = jnp.asarray(fill_of(case), dtype)
    zero = jnp.zeros((), dtype)
    mask = spread(keep, x.labels)
    array = x.array
    if form == "where_not":
        out = jnp.where(jnp.logical_not(mask), fill, array)
    elif form in ("add", "added_last"):
        out = array + jnp.where(mask, zero, fill)
    elif form == "float":
        out = array + (1 - mask.astype(dtype)) * fill
    elif form == "blend":
        out = array * mask.astype(dtype) + fill * (1 - mask.astype(dtype))
    elif form == "minimum":
        out = jnp.minimum(array, jnp.where(mask, jnp.asarray(jnp.inf, dtype), fill))
    elif form == "multiplied":
        out = array * mask.astype(dtype)
    elif form in ("full", "select"):
        full = jnp.broadcast_to(mask, array.shape)
        out = jax.lax.select(full, array, jnp.full(array.shape, fill))
    else:
        out = jnp.where(mask, array, fill)
    return x.with_array(out)


def keep_of(case: Case, x: Labelled, sides: Sides) -> Labelled | None:
    """Returns the mask of the case, both if it has two."""
    names = [m for m in (case.mask, case.mask2) if m != "none"]
    found = [MASKS[name](x, sides) for name in names]
    if not found:
        return None
    return found[0] if len(found) == 1 else _both(*found)


# --------------------------------------------------------------------- all of it


def modified(case: Case, x: Labelled, sides: Sides, root: float) -> Labelled:
    """Returns what the softmax is applied to, from the raw product."""
    x = scaled_scores(case, x, sides, root)
    x = _function(case, x, sides)
    steps = [lambda x: biased(case, x, sides)]
    for name in (case.mask, case.mask2):
        if name != "none":
            keep = MASKS[name](x, sides)
            # the default binds the mask of this round
            steps.append(lambda x, keep=keep: masked(case, x, keep, case.form))
    for step in steps[::-1] if case.bias_last else steps:
        x = step(x)
    return x


def product(case: Case, q: Labelled, k: Labelled, order: str) -> Labelled:
    """The score product, in the dtype that the case wants."""
    wide = jnp.promote_types(q.array.dtype, jnp.float32)
    preferred = wide if case.score_dtype == "preferred" else None
    x = contract(case.product, q, k, order, preferred)
    if case.score_dtype == "cast":
        x = x.with_array(x.array.astype(wide))
    return x


def scores(case: Case, q: Labelled, k: Labelled, sides: Sides, order: str) -> Labelled:
    """Returns what the softmax is applied to, with its labels in `order`."""
    q, k = normalized(case, q, sides), normalized(case, k, sides)
    root = q.size("d") ** 0.5
    q, k = scaled_operands(case, q, k)
    x = product(case, q, k, order)
    if case.mutation == "two_products":
        other = product(case, q, k.with_array(jnp.flip(k.array, k.axis("s"))), order)
        x = x.with_array(x.array + 0.5 * other.array)
    elif case.mutation in ("transposed", "plus_transposed"):
        turned = order.translate(str.maketrans("ts", "st"))
        other = moved(Labelled(x.array, turned), order).array
        both = case.mutation == "plus_transposed"
        x = x.with_array(x.array + other if both else other)
    elif case.mutation == "negated_twice":
        x = x.with_array(jnp.negative(jnp.negative(x.array)))
    x = modified(case, x, sides, root)
    if case.mutation == "self_masked":
        x = x.with_array(jnp.where(x.array > 0, x.array, fill_of(case)))
    return x
