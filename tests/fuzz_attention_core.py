"""One attention site: head sharing, layouts, vmap, softmax, value product."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from fuzz_backward import SOFTMAX_RULES, attention_with_rule, softmax_with_rule
from fuzz_case import Case
from fuzz_labels import Labelled, contract, map_over, merged, split, spread
from fuzz_scores import keep_of, scores
from fuzz_softmax import LATE, mutated, probabilities
from jax.ad_checkpoint import checkpoint_name

Parts = tuple[Labelled, Labelled, Labelled, dict[str, Labelled]]


def _tagged(x: Labelled, name: str) -> Labelled:
    return x.with_array(checkpoint_name(x.array, name))


def _stopped(case: Case, name: str, x: Labelled) -> Labelled:
    if case.stop != name:
        return x
    return x.with_array(jax.lax.stop_gradient(x.array))


def _order_of(case: Case, q: Labelled) -> str:
    """Returns the labels of the scores; number 0 is the usual order."""
    usual = "".join(c for c in "abhngz" if c in q.labels) + "ts"
    if case.order == 0:
        return usual
    orders = list(itertools.islice(itertools.permutations(usual), 5040))
    return "".join(orders[(case.order * 37) % len(orders)])


# ------------------------------------------------------------- sharing key heads


def _repeated(case: Case, x: Labelled, sizes) -> Labelled:
    """Gives keys or values one head for every query head: n -> h."""
    axis, group = x.axis("n"), sizes["g"]
    labels = x.labels.replace("n", "h")
    if case.gqa == "tile":
        reps = [group if i == axis else 1 for i in range(x.array.ndim)]
        return Labelled(jnp.tile(x.array, reps), labels)
    if case.gqa == "broadcast":
        array = jnp.expand_dims(x.array, axis + 1)
        shape = list(array.shape)
        shape[axis + 1] = group
        array = jnp.broadcast_to(array, shape)
        return Labelled(
            array.reshape(*x.array.shape[:axis], -1, *shape[axis + 2 :]), labels
        )
    return Labelled(jnp.repeat(x.array, group, axis), labels)


def arranged(case: Case, parts: Parts, sizes) -> Parts:
    """Brings the heads and batch of all operands together."""
    q, k, v, sides = parts
    if case.gqa == "squeezed" and case.kv_heads == 1 and "n" in k.labels:
        k, v = (
            Labelled(x.array.squeeze(x.axis("n")), x.labels.replace("n", ""))
            for x in (k, v)
        )
    elif case.gqa == "grouped":
        q = split(q, "h", "ng", sizes)
        sides = {
            name: split(x, "h", "ng", sizes) if "h" in x.labels else x
            for name, x in sides.items()
        }
    elif case.group > 1 or case.gqa == "tile":
        k, v = _repeated(case, k, sizes), _repeated(case, v, sizes)
    else:
        k, v = (Labelled(x.array, x.labels.replace("n", "h")) for x in (k, v))
    if case.layout == "merged_bh":
        outer = "".join(c for c in "abh" if c in q.labels)
        q, k, v = (merged(x, outer, "z", sizes) for x in (q, k, v))
        sides = {
            name: merged(x, outer, "z", sizes) if {*outer} & {*x.labels} else x
            for name, x in sides.items()
        }
    return q, k, v, sides


# ------------------------------------------------------------------ the attention


def _weights(case: Case, x: Labelled, keep: Labelled | None) -> Labelled:
    if case.backward in SOFTMAX_RULES:
        array = softmax_with_rule(case.backward, x.array, x.axis("s"))
        return x.with_array(array)
    return probabilities(case, x, keep)


def _values(case: Case, p: Labelled, v: Labelled, out: str) -> Labelled:
    """The value product, with the division by the sum where it comes late."""
    narrow = p.with_array(p.array.astype(v.array.dtype))
    if case.softmax not in LATE:
        return contract(case.value_product, narrow, v, out)
    if case.softmax == "ones_column":
        pad = [(0, 0)] * v.array.ndim
        pad[v.axis("e")] = (0, 1)
        v = v.with_array(jnp.pad(v.array, pad, constant_values=1))
        wide = contract(case.value_product, narrow, v, out)
        axis, size = wide.axis("e"), wide.size("e") - 1
        total = jax.lax.slice_in_dim(wide.array, size, None, axis=axis)
        return wide.with_array(
            jax.lax.slice_in_dim(wide.array, 0, size, axis=axis) / total
        )
    raw = contract(case.value_product, narrow, v, out)
    total = Labelled(p.array.sum(p.axis("s")), p.labels.replace("s", ""))
    return raw.with_array((raw.array / spread(total, raw.labels)).astype(v.array.dtype))


def _operands(case: Case, parts: Parts) -> Parts:
    q, k, v, sides = parts
    if case.mutation == "shared_qk" and q.array.size == k.array.size:
        turned = q.labels.translate(str.maketrans("t", "s"))
        same = {c: q.size(c) for c in q.labels.replace("t", "")}
        if q.size("t") == k.size("s") and all(k.labels.count(c) for c in same):
            k = Labelled(q.array, turned)
    elif case.mutation == "keys_as_values":
        v = Labelled(k.array, k.labels.replace("d", "e"))
    elif case.mutation == "other_head":
        axis = next((k.axis(c) for c in "hnzs" if c in k.labels), 0)
        k = k.with_array(jnp.roll(k.array, 1, axis))
    elif case.mutation == "rolled_values":
        v = v.with_array(jnp.roll(v.array, 1, v.axis("s")))
    q, k, v = (_stopped(case, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    return q, k, v, sides


def attend(case: Case, parts: Parts) -> dict[str, Labelled]:
    """Computes one site whose operands are arranged.

    Returns:
      "out", and "scores", "probs" on the way to it.
    """
    parts = _operands(case, parts)
    order = _order_of(case, parts[0])
    result = parts[0].labels.replace("d", "e")
    if case.gqa == "squeezed":
        result = "".join(c for c in "abhte" if c in result)

    def seen(q, k, v, sides, case=case) -> dict[str, Labelled]:
        x = _stopped(case, "scores", scores(case, q, k, sides, order))
        x = _tagged(x, "scores")
        p = _weights(case, x, keep_of(case, x, sides))
        p = _tagged(_stopped(case, "probs", mutated(case, p, x, sides)), "probs")
        out = _tagged(_values(case, p, v, result), "out")
        return {"out": out, "scores": x, "probs": p}

    def run(*args):
        return seen(*args)["out"]

    if case.backward.startswith("core_"):
        return {"out": attention_with_rule(case, run, order, *parts)}
    return seen(*parts)


def _mapped(case: Case, parts: Parts, labels: str) -> dict[str, Labelled]:
    if not labels:
        return attend(case, parts)
    return map_over(
        labels[0],
        lambda inner: _mapped(case, inner, labels[1:]),
        parts,
        last=case.seed % 2 == 1,
    )


def _back(case: Case, out: Labelled, q_labels: str, sizes) -> Labelled:
    """Gives the result the labels of the query, head dims in one again."""
    wanted = q_labels.replace("d", "e")
    if "n" in out.labels:
        rest = "".join(c for c in wanted if c != "h")
        out = Labelled(spread(out, "ng" + rest), "ng" + rest)
        shape = (-1, *out.array.shape[2:])
        out = Labelled(out.array.reshape(shape), "h" + rest)
    elif "z" in out.labels:
        outer = "".join(c for c in "abh" if c in wanted)
        rest = "".join(c for c in wanted if c not in outer)
        out = split(Labelled(spread(out, "z" + rest), "z" + rest), "z", outer, sizes)
    return Labelled(spread(out, wanted), wanted)


def site(case: Case, parts: Parts, sizes) -> dict[str, Labelled]:
    """Computes one attention site.

    Args:
      case: the case.
      parts: q with h, k and v with n, the sides with h.
      sizes: extent of every label.

    Returns:
      "out" with the labels of q (e for d), and what else it saw.
    """
    labels = parts[0].labels
    arranged_parts = arranged(case, parts, sizes)
    names = "".join(
        c
        if c in arranged_parts[0].labels
        else "n" * (c == "h" and case.gqa == "grouped")
        for c in case.mapped
    )
    found = _mapped(case, arranged_parts, names)
    return found | {"out": _back(case, found["out"], labels, sizes)}
