"""Spellings of the softmax, and mutations of it and of the probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_case import Case
from fuzz_labels import Labelled, contract, moved, spread
from fuzz_scores import Sides

LOG2E = math.log2(math.e)


def _max(x, axis):
    return jnp.max(x, axis, keepdims=True)


def _stable(x, axis):
    e = jnp.exp(x - _max(x, axis))
    return e / e.sum(axis, keepdims=True)


def _stable_stop(x, axis):
    e = jnp.exp(x - jax.lax.stop_gradient(_max(x, axis)))
    return e / e.sum(axis, keepdims=True)


def _unsafe(x, axis):
    e = jnp.exp(x)
    return e / jnp.sum(e, axis, keepdims=True)


def _reciprocal(x, axis):
    e = jnp.exp(x - _max(x, axis))
    return e * (1.0 / e.sum(axis, keepdims=True))


def _exp2(x, axis):
    x = x * LOG2E
    e = jnp.exp2(x - _max(x, axis))
    return e / e.sum(axis, keepdims=True)


def _exp2_unsafe(x, axis):
    e = jnp.exp2(x * LOG2E)
    return e / e.sum(axis, keepdims=True)


def _max_all(x, axis):
    # Rows whose scores all lie far below the largest of all would be 0 / 0.
    e = jnp.exp(x - jnp.max(jax.lax.stop_gradient(x)))
    return e / e.sum(axis, keepdims=True)


def _sum_product(x, axis):
    e = jnp.exp(x - _max(x, axis))
    total = jnp.tensordot(e, jnp.ones(x.shape[axis], x.dtype), ((axis,), (0,)))
    return e / jnp.expand_dims(total, axis)


def _clamped_max(x, axis):
    top = jnp.maximum(_max(x, axis), -1e4)
    e = jnp.exp(x - top)
    return e / e.sum(axis, keepdims=True)


def _lse(x, axis):
    return jnp.exp(x - jax.nn.logsumexp(x, axis, keepdims=True))


SPELLINGS: dict[str, Callable] = {
    "jax": jax.nn.softmax,
    "stable": _stable,
    "stable_stop": _stable_stop,
    "unsafe": _unsafe,
    "lse": _lse,
    "log_softmax": lambda x, axis: jnp.exp(jax.nn.log_softmax(x, axis)),
    "reciprocal": _reciprocal,
    "exp2": _exp2,
    "exp2_unsafe": _exp2_unsafe,
    "max_all": _max_all,
    "sum_product": _sum_product,
    "clamped_max": _clamped_max,
}
# The division by the sum comes after the value product.
LATE = ("late", "late_unsafe", "ones_column")


# ------------------------------------------------- softmaxes that are not, or hardly


def _other(axis: int, x) -> int:
    return (axis - 1) % x.ndim


def _over(numerator, axis, total=None):
    total = numerator.sum(axis, keepdims=True) if total is None else total
    return numerator / total


def _exp(x, axis):
    return jnp.exp(x - _max(x, axis))


def _partial_sum(x, axis):
    e = _exp(x, axis)
    rest = jax.lax.slice_in_dim(e, 1, None, axis=axis)
    return e / rest.sum(axis, keepdims=True)


def _running_max(x, axis):
    e = jnp.exp(x - jax.lax.cummax(x, axis=axis % x.ndim))
    return e / e.sum(axis, keepdims=True)


def _sink(x, axis):
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, 1)
    p = jax.nn.softmax(jnp.pad(x, pad, constant_values=0.5), axis)
    return jax.lax.slice_in_dim(p, 0, x.shape[axis], axis=axis)


WRONG_SOFTMAXES: dict[str, Callable] = {
    "sum_other_axis": lambda x, a: _over(_exp(x, a), _other(a, x)),
    "max_other_axis": lambda x, a: _over(jnp.exp(x - _max(x, _other(a, x))), a),
    "max_halved": lambda x, a: _over(jnp.exp(x - 0.5 * _max(x, a)), a),
    "sum_epsilon": lambda x, a: _exp(x, a) / (_exp(x, a).sum(a, keepdims=True) + 1e-3),
    "sum_one": lambda x, a: _exp(x, a) / (_exp(x, a).sum(a, keepdims=True) + 1),
    "no_sum": lambda x, a: _exp(x, a),
    "relu_attention": lambda x, a: (
        jax.nn.relu(x) / (jax.nn.relu(x).sum(a, keepdims=True) + 1e-2)
    ),
    "sigmoid_attention": lambda x, a: jax.nn.sigmoid(x),
    "base_three": lambda x, a: _over(jnp.power(3.0, x - _max(x, a)), a),
    "softmax_twice": lambda x, a: jax.nn.softmax(jax.nn.softmax(x, a), a),
    "shifted_exp": lambda x, a: _over(jnp.exp(x - _max(x, a) + 0.3), a),
    "partial_sum": _partial_sum,
    "running_max": _running_max,
    "sink": _sink,
    "rounded": lambda x, a: jax.nn.softmax(jnp.round(x * 2) / 2, a),
}
AXIS_MUTATIONS = {"axis_t": "t", "axis_h": "hngz", "axis_ts": "ts"}


def _wrong_axes(case: Case, x: Labelled):
    """Softmax over other dims than the keys."""
    axes = tuple(x.axis(c) for c in AXIS_MUTATIONS[case.mutation] if c in x.labels)
    return jax.nn.softmax(x.array, axes or x.axis("s"))


def probabilities(case: Case, x: Labelled, keep: Labelled | None) -> Labelled:
    """Returns the probabilities, or their numerators where the division is late."""
    axis = x.axis("s")
    array = x.array
    narrow = array.dtype
    if case.softmax_dtype == "float32":
        array = array.astype(jnp.promote_types(narrow, jnp.float32))
    if case.mutation in WRONG_SOFTMAXES:
        out = WRONG_SOFTMAXES[case.mutation](array, axis)
    elif case.mutation in AXIS_MUTATIONS:
        out = _wrong_axes(case, x.with_array(array))
    elif case.softmax == "where" and keep is not None:
        mask = jnp.broadcast_to(spread(keep, x.labels), array.shape)
        out = jax.nn.softmax(array, axis, where=mask)
    elif case.softmax == "late_unsafe":
        out = jnp.exp(array)
    elif case.softmax in LATE:
        out = _exp(array, axis)
    else:
        out = SPELLINGS.get(case.softmax, jax.nn.softmax)(array, axis)
    return x.with_array(out.astype(narrow))


# -------------------------------------------------------------- the probabilities


def _pattern(p: Labelled, labels: str) -> jax.Array:
    """A fixed multiplier that looks random."""
    labels = "".join(c for c in p.labels if c in labels)
    shape = tuple(p.size(c) for c in labels)
    values = np.cos(np.arange(math.prod(shape)) * 2.7).reshape(shape) + 1.2
    return spread(Labelled(jnp.asarray(values, p.array.dtype), labels), p.labels)


def _dropout(p: Labelled, seed: int) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.key(seed), 0.7, p.array.shape)
    return jnp.where(keep, p.array / 0.7, 0)


def _mixed_heads(p: Labelled, mix: Labelled) -> jax.Array:
    label = next((c for c in "hgnz" if c in p.labels), None)
    if label is None or label != "h":
        return p.array * 0.5
    turned = Labelled(p.array, p.labels.replace("h", "x"))
    return contract("einsum", turned, Labelled(mix.array, "xh"), p.labels).array


def _mean_heads(p: Labelled) -> jax.Array:
    axes = tuple(p.axis(c) for c in "hngz" if c in p.labels)
    mean = p.array.mean(axes, keepdims=True) if axes else p.array * 0.5
    return jnp.broadcast_to(mean, p.array.shape)


def _residual(p: Labelled) -> jax.Array:
    eye = Labelled(jnp.eye(p.size("t"), dtype=p.array.dtype), "ts")
    return 0.5 * p.array + 0.5 * spread(eye, p.labels)


def _transposed(p: Labelled) -> jax.Array:
    turned = p.labels.translate(str.maketrans("ts", "st"))
    return moved(Labelled(p.array, turned), p.labels).array


def _masked_after(p: Labelled) -> jax.Array:
    t, s = p.size("t"), p.size("s")
    keep = Labelled(jnp.tril(jnp.ones((t, s), bool), k=1), "ts")
    return jnp.where(spread(keep, p.labels), p.array, 0)


def mutated(case: Case, p: Labelled, x: Labelled, sides: Sides) -> Labelled:
    """Applies the case's mutation of the probabilities, if it has one.

    Args:
      case: the case.
      p: the probabilities.
      x: the scores they come from.
      sides: the side operands.
    """
    a, s = p.array, p.axis("s")
    changes: dict[str, Callable] = {
        "scaled": lambda: a * 0.75,
        "fixed_multiplier": lambda: a * _pattern(p, "ts"),
        "row_weights": lambda: a * _pattern(p, "t"),
        "key_weights": lambda: a * _pattern(p, "s"),
        "input_multiplier": lambda: a * spread(sides["multiplier"], p.labels),
        "dropout": lambda: _dropout(p, case.seed % 1000),
        "masked_after": lambda: _masked_after(p),
        "squared": lambda: a * a,
        "p_transposed": lambda: _transposed(p),
        "rolled": lambda: jnp.roll(a, 1, s),
        "epsilon_added": lambda: a + 1e-2,
        "threshold": lambda: jnp.where(a > 0.2, a, 0),
        "mean_heads": lambda: _mean_heads(p),
        "mixed_heads": lambda: _mixed_heads(p, sides["mix"]),
        "cumulative": lambda: jnp.cumsum(a, s),
        "p_residual": lambda: _residual(p),
        "times_scores": lambda: a * x.array,
    }
    change = changes.get(case.mutation)
    return p if change is None else p.with_array(change())
