"""From the arguments of `attention` to an `AttentionProblem` and its arrays.

Everything that can be wrong with a call is said here, by the name of the argument.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import AttentionProblem, Operands

DTYPES = ("bfloat16", "float16", "float32", "float64")
Window = int | tuple[int | None, int | None] | None


def make_problem(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any,
    mask: Any,
    scale: float | None,
    causal: bool,
    offset: int,
    window: Window,
    softcap: float | None,
    q_segment_ids: Any,
    kv_segment_ids: Any,
    q_lengths: Any,
    kv_lengths: Any,
    sinks: Any,
) -> tuple[AttentionProblem, Operands]:
    """Returns the problem of a call of `attention`, and its arrays.

    All batch dims become one; the arguments are those of `attention`.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: a wrong shape or value.
    """
    q, k, v = (_array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    _check_shapes(q, k, v)
    _check_dtypes(q, k, v)
    lead, (q_len, heads, head_dim) = q.shape[:-3], q.shape[-3:]
    k_len, kv_heads, value_dim = v.shape[-3:]
    full = (*lead, heads, q_len, k_len)
    bias, mask = _bias(bias, full), _mask(mask, full)
    segments = _segments(q_segment_ids, kv_segment_ids, lead, q_len, k_len)
    lengths = (
        _integers("q_lengths", q_lengths, lead),
        _integers("kv_lengths", kv_lengths, lead),
    )
    sinks = _sinks(sinks, heads)
    problem = AttentionProblem(
        batch=math.prod(lead),
        q_len=q_len,
        k_len=k_len,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=q.dtype.name,
        scale=_scale(scale, head_dim),
        softcap=_softcap(softcap),
        causal=_flag("causal", causal),
        offset=_integer("offset", offset),
        window=_window(window),
        bias=None if bias is None else bias.shape,
        bias_dtype=None if bias is None else bias.dtype.name,
        mask=None if mask is None else mask.shape,
        segments=segments[0] is not None,
        q_lengths=lengths[0] is not None,
        k_lengths=lengths[1] is not None,
        sinks=sinks is not None,
    )
    q, k, v = (x.reshape(problem.batch, *x.shape[-3:]) for x in (q, k, v))
    return problem, Operands(q, k, v, bias, mask, *segments, *lengths, sinks)


def _array(name: str, value: Any) -> jax.Array:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an array")
    return jnp.asarray(value)


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3:
            raise ValueError(
                f"{name}: got shape {x.shape}, expected [..., length, heads, dim]"
            )
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            f"q, k, v: got batch dims {q.shape[:-3]}, {k.shape[:-3]}, {v.shape[:-3]},"
            " expected the same; broadcast them first"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k: got head dim {k.shape[-1]}, expected that of q, {q.shape[-1]}"
        )
    if k.shape[-3:-1] != v.shape[-3:-1]:
        raise ValueError(
            f"v: got length and heads {v.shape[-3:-1]}, expected those of k,"
            f" {k.shape[-3:-1]}"
        )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads and (not kv_heads or heads % kv_heads):
        raise ValueError(
            f"k: got {kv_heads} heads, expected a divisor of the {heads} heads of q"
        )


def _check_dtypes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k, v: got {q.dtype}, {k.dtype}, {v.dtype}, expected one dtype; cast"
            " them with astype"
        )
    if q.dtype.name not in DTYPES:
        raise TypeError(f"q: got {q.dtype}, expected one of {', '.join(DTYPES)}")


def _broadcast(name: str, array: jax.Array, full: tuple[int, ...]) -> jax.Array:
    """Returns an array broadcastable to [...,H,T,S] as [B|1,H|1,T|1,S|1]."""
    shape = (1,) * (len(full) - array.ndim) + array.shape
    fits = len(shape) == len(full) and all(
        n in (1, whole) for n, whole in zip(shape, full, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name}: got shape {array.shape}, expected one that broadcasts to"
            f" [..., heads, queries, keys] = {full}"
        )
    array = array.reshape(shape)
    lead = full[:-3]
    if math.prod(shape[:-3]) != 1:
        array = jnp.broadcast_to(array, (*lead, *shape[-3:]))
        return array.reshape(math.prod(lead), *shape[-3:])
    return array.reshape(1, *shape[-3:])


def _bias(bias: Any, full: tuple[int, ...]) -> jax.Array | None:
    if bias is None:
        return None
    bias = _array("bias", bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        hint = "; a boolean array is a mask" if bias.dtype == bool else ""
        raise TypeError(f"bias: got {bias.dtype}, expected a float dtype{hint}")
    return _broadcast("bias", bias, full)


def _mask(mask: Any, full: tuple[int, ...]) -> jax.Array | None:
    if mask is None:
        return None
    mask = _array("mask", mask)
    if mask.dtype != bool:
        raise TypeError(
            f"mask: got {mask.dtype}, expected bool, True where a key is seen; what is"
            " added to the scores is a bias"
        )
    return _broadcast("mask", mask, full)


def _integers(
    name: str, value: Any, lead: tuple[int, ...], *rest: int
) -> jax.Array | None:
    """Returns int32 [B,*rest] of an array that broadcasts to [...,*rest]."""
    if value is None:
        return None
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: got {array.dtype}, expected integers")
    full = (*lead, *rest)
    try:
        array = jnp.broadcast_to(array, full)
    except ValueError as error:
        raise ValueError(f"{name}: got shape {array.shape}, expected {full}") from error
    return array.astype(jnp.int32).reshape(math.prod(lead), *rest)


def _segments(
    queries: Any, keys: Any, lead: tuple[int, ...], q_len: int, k_len: int
) -> tuple[jax.Array | None, jax.Array | None]:
    if (queries is None) != (keys is None):
        missing = "q_segment_ids" if queries is None else "kv_segment_ids"
        raise ValueError(
            f"{missing}: got None, expected an array; queries and keys need segments"
            " both, the same ones in self-attention"
        )
    return (
        _integers("q_segment_ids", queries, lead, q_len),
        _integers("kv_segment_ids", keys, lead, k_len),
    )


def _sinks(sinks: Any, heads: int) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = _array("sinks", sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks: got {sinks.dtype}, expected a float dtype")
    if sinks.shape != (heads,):
        raise ValueError(
            f"sinks: got shape {sinks.shape}, expected one logit a head, ({heads},)"
        )
    return sinks.astype(jnp.promote_types(sinks.dtype, jnp.float32))


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return max(head_dim, 1) ** -0.5
    return _real("scale", scale)


def _softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    value = _real("softcap", softcap)
    if value <= 0:
        raise ValueError(f"softcap: got {value}, expected a positive number or None")
    return value


def _real(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name}: got {type(value).__name__}, expected a Python number; an array"
            " can be multiplied into q"
        )
    if not math.isfinite(value):
        raise ValueError(f"{name}: got {value}, expected a finite number")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected True or False")
    return value


def _integer(name: str, value: Any) -> int:
    try:
        return value.__index__()
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{name}: got {type(value).__name__}, expected a Python integer; what is"
            " known at run time only can be a mask or lengths"
        ) from error


def _window(window: Window) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    pair = window if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2:
        raise ValueError(f"window: got {window}, expected (left, right) or one number")
    left, right = (None if n is None else _integer("window", n) for n in pair)
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(
            f"window: got {window}, expected numbers of keys, not negative"
        )
    return None if left is right is None else (left, right)
