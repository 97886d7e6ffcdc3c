"""Attention with a backward pass of the user's own, right or deliberately other.

A rewritten program must follow the user's rule, whatever it computes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from fuzz_case import Case
from fuzz_labels import Labelled, contract, spread
from fuzz_scores import Sides, scores


def _proper(p, g, axis):
    return p * (g - (p * g).sum(axis, keepdims=True))


def _hidden(p, g, axis):
    """The gradient of a softmax that would have masked its first key."""
    places = jax.lax.broadcasted_iota(jnp.int32, p.shape, axis)
    return jnp.where(places > 0, _proper(p, g, axis), 0)


SOFTMAX_RULES: dict[str, Callable] = {
    "softmax_exact": _proper,
    "softmax_through": lambda p, g, axis: g,
    "softmax_doubled": lambda p, g, axis: 2 * _proper(p, g, axis),
    "softmax_no_rowsum": lambda p, g, axis: p * g,
    "softmax_clipped": lambda p, g, axis: jnp.clip(_proper(p, g, axis), -0.02, 0.02),
    "softmax_zero": lambda p, g, axis: jnp.zeros_like(g),
    "softmax_masked": _hidden,
}


def softmax_with_rule(name: str, array, axis: int):
    """A softmax whose backward pass is a row of SOFTMAX_RULES."""

    @jax.custom_vjp
    def softmax(x):
        return jax.nn.softmax(x, axis)

    def forward(x):
        p = softmax(x)
        return p, p

    def backward(p, g):
        return (SOFTMAX_RULES[name](p, g, axis),)

    softmax.defvjp(forward, backward)
    return softmax(array)


def _floats(sides: Sides) -> tuple[dict, dict]:
    """Splits the sides into those with a gradient and the rest."""
    one, two = {}, {}
    for name, side in sides.items():
        kind = one if jnp.issubdtype(side.array.dtype, jnp.floating) else two
        kind[name] = side
    return one, two


def _times(tree, factor):
    return jax.tree.map(lambda x: (x * factor).astype(x.dtype), tree)


def _flash_rule(case: Case, order: str, delta: bool) -> Callable:
    """A backward pass as flash attention does it, from the rows' logsumexp."""

    def rule(saved, dout):
        q, k, v, floats, rest, out = saved

        def x_of(q, k, floats):
            return scores(case, q, k, {**floats, **rest}, order)

        x, score_vjp = jax.vjp(x_of, q, k, floats)
        lse = jax.nn.logsumexp(x.array, x.axis("s"), keepdims=True)
        p = x.with_array(jnp.exp(x.array - lse))
        p_narrow = p.with_array(p.array.astype(v.array.dtype))
        dv = contract("einsum", p_narrow, dout, v.labels)
        dp = contract("einsum", dout, v, order)
        ds = dp.array
        if delta:
            rows = (dout.array * out.array).sum(out.axis("e"))
            rows = Labelled(rows, out.labels.replace("e", ""))
            ds = ds - spread(rows, order)
        ds = x.with_array((p.array * ds).astype(x.array.dtype))
        dq, dk, dfloats = score_vjp(ds)
        return dq, dk, dv, dfloats

    return rule


def _vjp_rule(run: Callable, change: Callable) -> Callable:
    """The gradients of `run`, changed."""

    def rule(saved, dout):
        q, k, v, floats, rest, _ = saved
        _, vjp = jax.vjp(
            lambda q, k, v, f: run(q, k, v, {**f, **rest}), q, k, v, floats
        )
        return change(*vjp(dout))

    return rule


def _rule_of(case: Case, run: Callable, order: str) -> Callable:
    name = case.backward

    def clipped(*grads):
        return jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1), grads)

    def values_only(dq, dk, dv, floats):
        return _times(dq, 0), _times(dk, 0), dv, _times(floats, 0)

    def sharper(q, k, v, sides):
        return run(_times(q, 1.5), k, v, sides)

    def other_mask(q, k, v, sides):
        return run(q, k, v, sides, case.but(mask="blocks", mask2="none"))

    rules = {
        "core_exact": lambda: _vjp_rule(run, lambda *grads: grads),
        "core_doubled": lambda: _vjp_rule(run, lambda *grads: _times(grads, 2)),
        "core_clipped": lambda: _vjp_rule(run, clipped),
        "core_v_only": lambda: _vjp_rule(run, values_only),
        "core_other_scale": lambda: _vjp_rule(sharper, lambda *grads: grads),
        "core_other_mask": lambda: _vjp_rule(other_mask, lambda *grads: grads),
        "core_flash": lambda: _flash_rule(case, order, True),
        "core_flash_no_delta": lambda: _flash_rule(case, order, False),
    }
    return rules[name]()


def attention_with_rule(
    case: Case, run: Callable, order: str, q: Labelled, k: Labelled, v: Labelled,
    sides: Sides,
) -> Labelled:  # fmt: skip
    """Attention as `run` computes it, with the backward pass that the case names.

    Args:
      case: `backward` starts with "core_".
      run: from q, k, v, sides to the result; takes another case at the end.
      order: labels of the scores.
      q, k, v: the operands.
      sides: the side operands.
    """
    floats, rest = _floats(sides)
    rule = _rule_of(case, run, order)

    @jax.custom_vjp
    def attention(q, k, v, floats, rest):
        return run(q, k, v, {**floats, **rest})

    def forward(q, k, v, floats, rest):
        out = attention(q, k, v, floats, rest)
        return out, (q, k, v, floats, rest, out)

    def backward(saved, dout):
        return (*rule(saved, dout), None)

    attention.defvjp(forward, backward)
    return attention(q, k, v, floats, rest)
