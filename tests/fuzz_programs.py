"""From a Case to a JAX function and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_attention_core import Parts, site
from fuzz_case import Case
from fuzz_inputs import (
    DENSE_LABELS,
    STACKED,
    first_input,
    key_labels,
    make_arrays,
    outer_labels,
    query_labels,
    side_labels,
    sizes_of,
    value_labels,
    wanted_names,
)
from fuzz_labels import Labelled, moved

Arrays = dict[str, Any]
POLICIES = jax.checkpoint_policies
NAMED_POLICIES = {
    "save_only_these_names": ("out", "scores"),
    "save_anything_except_these_names": ("probs",),
    "save_any_names_but_these": ("probs", "scores"),
}


def rematted(case: Case, scope: str, function: Callable) -> Callable:
    """Puts the case's checkpoint around `function` if it belongs to this scope."""
    if case.remat == "none" or case.remat_scope != scope:
        return function
    if case.remat == "full":
        return jax.checkpoint(function)
    if case.remat == "full_cse":
        return jax.checkpoint(function, prevent_cse=False)
    policy = getattr(POLICIES, case.remat)
    if case.remat in NAMED_POLICIES:
        policy = policy(*NAMED_POLICIES[case.remat])
    return jax.checkpoint(function, policy=policy)


# -------------------------------------------------------------- q, k, v and sides


def _sides(case: Case, arrays: Arrays) -> dict[str, Labelled]:
    mask = case.mask if case.mask in DENSE_LABELS else case.mask2
    labels = {
        "bias": side_labels(case, case.bias),
        "slopes": "h",
        "table": "rh",
        "scale": "",
        "temperature": "h",
        "cap": "",
        "gain": "d",
        "multiplier": "ts",
        "mix": "xh",
        "lengths": side_labels(case, "b"),
        "valid": side_labels(case, "bs"),
        "q_segments": side_labels(case, "bt"),
        "k_segments": side_labels(case, "bs"),
        "dense": side_labels(case, DENSE_LABELS.get(mask, "ts")),
    }
    found = {n: Labelled(arrays[n], c) for n, c in labels.items() if n in arrays}
    if case.bias == "alibi_constant":
        dtype = arrays[first_input(case)].dtype
        slopes = 2.0 ** -np.arange(1, case.heads + 1)
        found["slopes"] = Labelled(jnp.asarray(slopes, dtype), "h")
    return found


def _stored(case: Case, name: str, array, labels: str, sizes) -> Labelled:
    if case.layout == "flat":
        array = array.reshape(*array.shape[:2], *(sizes[c] for c in labels[2:]))
    return Labelled(array, labels)


def _fused(case: Case, arrays: Arrays, sizes) -> tuple[Labelled, Labelled, Labelled]:
    outer = outer_labels(case)
    wide = arrays["x"] @ arrays["w"]
    width = case.heads * case.head_dim
    pieces = jnp.split(wide, [width, 2 * width], axis=-1)
    found = []
    for piece, labels in zip(pieces, ("thd", "snd", "sne"), strict=True):
        shape = (*piece.shape[:-2], *(sizes[c] for c in labels))
        found.append(Labelled(piece.reshape(shape), outer + labels))
    return found[0], found[1], found[2]


def _projected(case: Case, arrays: Arrays) -> tuple[Labelled, Labelled, Labelled]:
    outer = outer_labels(case)
    rows = (("x", "wq", "t", "hd"), ("y", "wk", "s", "nd"), ("y", "wv", "s", "ne"))
    q, k, v = (
        Labelled(
            jnp.einsum(f"...m,m{w}->...{w}", arrays[x], arrays[name]), outer + n + w
        )
        for x, name, n, w in rows
    )
    return q, k, v


def operands(case: Case, arrays: Arrays) -> Parts:
    """Returns q, k, v in the case's layout, and the sides."""
    sizes = sizes_of(case)
    names = (query_labels(case), key_labels(case), value_labels(case))
    if case.source == "separate":
        q, k, v = (
            _stored(case, name, arrays[name], labels, sizes)
            for name, labels in zip("qkv", names, strict=True)
        )
    elif case.source == "self":
        q, k, v = (Labelled(arrays["x"], labels) for labels in names)
    else:
        made = (
            _fused(case, arrays, sizes)
            if case.source == "fused"
            else _projected(case, arrays)
        )
        q, k, v = (moved(x, labels) for x, labels in zip(made, names, strict=True))
    if case.sites == "k_is_v":
        v = Labelled(k.array, v.labels)
    return q, k, v, _sides(case, arrays)


# ---------------------------------------------------------------- sites and loops


def _sites(case: Case, parts: Parts) -> dict[str, Labelled]:
    sizes = sizes_of(case)
    run = rematted(case, "core", lambda parts: site(case, parts, sizes))
    q, k, v, sides = parts
    found = run(parts)
    out = found["out"]
    if case.sites == "shared_kv":
        second = q.with_array(q.array * 0.5 + 0.1)
        other = run((second, k, v, sides))["out"].array
    elif case.sites == "shared_probs":
        flipped = v.with_array(jnp.flip(v.array, v.axis("s")))
        other = 0.5 * run((q, k, flipped, sides))["out"].array
    elif case.sites == "chain":
        # The result has the queries' layout and, here, their extents.
        other = run((Labelled(out.array, q.labels), k, v, sides))["out"].array
    elif case.sites == "two_masks":
        second_case = case.but(mask="causal_iota", mask2="none", form="where")
        other = site(second_case, parts, sizes)["out"].array
    else:
        return found
    return found | {"out": out.with_array(out.array + other)}


def _layer(case: Case, parts: Parts, carry, weight):
    """One layer of a loop: queries (and perhaps keys) from the carry."""
    q, k, v, sides = parts
    labels = q.labels
    q = q.with_array(carry * weight)
    if case.loop == "scan_carried":
        k = Labelled(carry * 0.7, labels.replace("t", "s").replace("h", "n"))
    out = _sites(case, (q, k, v, sides))["out"]
    return out.array.astype(carry.dtype) + 0.5 * carry


def network(case: Case, arrays: Arrays) -> dict[str, Labelled]:
    """Computes the program's result and what else its attention saw."""
    parts = operands(case, arrays)
    if case.loop == "none":
        return rematted(case, "layer", lambda parts: _sites(case, parts))(parts)
    layer = rematted(case, "layer", lambda *xs: _layer(case, parts, *xs))
    weights = arrays["weights"]
    carry = parts[0].array

    def body(carry, weight):
        return layer(carry, weight), None

    if case.loop == "python":
        for weight in weights:
            carry = layer(carry, weight)
    elif case.loop == "nested":

        def outer(carry, factor):
            return jax.lax.scan(body, carry * factor, weights)[0], None

        factors = jnp.asarray([1.0, 0.5], carry.dtype)
        carry = jax.lax.scan(outer, carry, factors)[0]
    else:
        unroll = 2 if case.loop == "scan_unrolled" else 1
        carry = jax.lax.scan(body, carry, weights, unroll=unroll)[0]
    return {"out": Labelled(carry, parts[0].labels.replace("d", "e"))}


# -------------------------------------------------------------- results and losses


def _result(case: Case, out: Labelled, arrays: Arrays):
    """Returns what the program makes of the attention's result."""
    array = out.array
    if case.consume == "weighted" and case.differentiated:
        return array * arrays["dout"]
    if case.consume == "twice":
        return array * arrays["dout"] + jnp.sin(array)
    if case.consume == "square":
        return array * array
    if case.consume == "mean":
        return array.mean(out.axis("t"))
    if case.consume in ("project", "flatten"):
        usual = "".join(c for c in "abthe" if c in out.labels)
        array = moved(out, usual).array
        flat = array.reshape(*array.shape[:-2], -1)
        return flat @ arrays["wo"] if case.consume == "project" else flat.reshape(-1)
    return array


def _seen(case: Case, found: dict[str, Labelled]) -> list:
    """Returns the intermediate values that the case lets out."""
    if case.aux in ("probs", "scores") and case.aux in found:
        return [found[case.aux].array]
    if case.aux == "lse" and "scores" in found:
        x = found["scores"]
        return [jax.nn.logsumexp(x.array, x.axis("s"))]
    return []


def _outputs(case: Case, arrays: Arrays):
    found = network(case, arrays)
    return _result(case, found["out"], arrays), _seen(case, found)


def _loss(case: Case, arrays: Arrays):
    result, seen = _outputs(case, arrays)
    wide = result.astype(jnp.promote_types(result.dtype, jnp.float32))
    if case.consume == "project":
        wide = wide * wide
    elif case.consume == "flatten":
        wide = wide * jnp.cos(jnp.arange(wide.size, dtype=wide.dtype))
    return wide.sum(), seen


def _gradient_program(case: Case, loss: Callable, chosen: Arrays):
    """Runs one of the modes that take gradients of the loss."""
    grad = jax.grad(lambda c: loss(c)[0])
    tangent = jax.tree.map(jnp.cos, chosen)
    if case.mode == "grad":
        return jax.grad(loss, has_aux=True)(chosen)
    if case.mode == "value_and_grad":
        return jax.value_and_grad(loss, has_aux=True)(chosen)
    if case.mode == "sgd":
        return jax.tree.map(lambda w, g: w - 0.1 * g, chosen, grad(chosen))
    if case.mode == "jvp":
        return jax.jvp(lambda c: loss(c)[0], (chosen,), (tangent,))
    if case.mode == "hvp":
        return jax.jvp(grad, (chosen,), (tangent,))[1]
    if case.mode == "linearize":
        value, linear = jax.linearize(lambda c: loss(c)[0], chosen)
        return value, linear(tangent)
    if case.mode == "grad_grad":

        def squared(c):
            return sum(jnp.vdot(g, g) for g in jax.tree.leaves(grad(c)))

        return jax.grad(squared)(chosen)
    # accumulate: gradients of two microbatches, summed in a scan
    name = next(iter(chosen))

    def step(total, factor):
        one = grad(chosen | {name: chosen[name] * factor})
        return jax.tree.map(jnp.add, total, one), None

    zeros = jax.tree.map(jnp.zeros_like, chosen)
    factors = jnp.asarray([1.0, 0.5], chosen[name].dtype)
    return jax.lax.scan(step, zeros, factors)[0]


def _stacked_program(case: Case, loss: Callable, split: Callable, arrays: Arrays):
    """Runs one of the modes that map over examples."""
    first = first_input(case)
    axes = {name: 0 if name == first else None for name in arrays}
    if case.mode == "vmap_value":
        return jax.vmap(lambda a: _outputs(case, a), in_axes=(axes,))(arrays)
    chosen, _ = split(arrays)
    rest = {n: x for n, x in arrays.items() if n not in chosen}
    axes_of = [{n: axes[n] for n in part} for part in (chosen, rest)]

    def one(c, r):
        return loss(c | r)[0]

    if case.mode == "vmap_grad":
        if all(axis is None for axes in axes_of for axis in axes.values()):
            return jax.grad(one)(chosen, rest)
        return jax.vmap(jax.grad(one), in_axes=axes_of)(chosen, rest)
    return jax.grad(lambda c: jax.vmap(one, in_axes=axes_of)(c, rest).sum())(chosen)


def build(case: Case) -> tuple[Callable, Arrays]:
    """Returns a function of one dict of arrays, and the arrays."""
    arrays = make_arrays(case)
    names = wanted_names(case, arrays)

    def split(arrays):
        chosen = {n: arrays[n] for n in names}
        return chosen, {n: x for n, x in arrays.items() if n not in names}

    loss = rematted(case, "loss", lambda arrays: _loss(case, arrays))

    def program(arrays):
        if case.mode in STACKED:
            return _stacked_program(case, loss, split, arrays)
        if case.mode == "value":
            return rematted(case, "loss", lambda a: _outputs(case, a))(arrays)
        chosen, rest = split(arrays)
        if case.mode == "vjp":
            out, vjp = jax.vjp(lambda c: network(case, c | rest)["out"].array, chosen)
            return out, vjp(arrays["dout"].astype(out.dtype))
        return _gradient_program(case, lambda c: loss(c | rest), chosen)

    return program, arrays
