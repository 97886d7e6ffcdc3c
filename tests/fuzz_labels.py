"""Arrays whose dimensions have names, so that one program has many layouts.

The letters: a, b batch dims; h query heads; n key-value heads and g query heads of
each; z batch and heads in one dim; t queries; s keys; d head dim; e value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Labelled:
    """An array and the letters of its dimensions."""

    array: Any
    labels: str = field(metadata={"static": True})

    def axis(self, label: str) -> int:
        return self.labels.index(label)

    def size(self, label: str) -> int:
        return self.array.shape[self.axis(label)]

    def with_array(self, array) -> Labelled:
        return Labelled(array, self.labels)


def is_labelled(value) -> bool:
    return isinstance(value, Labelled)


def moved(x: Labelled, labels: str) -> Labelled:
    """Transposes to another order of the same labels."""
    if labels == x.labels:
        return x
    return Labelled(jnp.transpose(x.array, [x.axis(c) for c in labels]), labels)


def spread(x: Labelled, labels: str):
    """The array with a dim of size 1 for every label of `labels` that it lacks."""
    kept = "".join(c for c in labels if c in x.labels)
    array = moved(x, kept).array
    missing = [i for i, c in enumerate(labels) if c not in x.labels]
    return jnp.expand_dims(array, missing) if missing else array


def merged(x: Labelled, labels: str, into: str, sizes: Mapping[str, int]) -> Labelled:
    """Makes one dim, in front, of several; broadcasts over those it lacks."""
    rest = "".join(c for c in x.labels if c not in labels)
    array = spread(x, labels + rest)
    shape = [sizes[c] for c in labels]
    array = jnp.broadcast_to(array, (*shape, *array.shape[len(labels) :]))
    return Labelled(array.reshape(-1, *array.shape[len(labels) :]), into + rest)


def split(x: Labelled, label: str, into: str, sizes: Mapping[str, int]) -> Labelled:
    """Splits a dim into several, in its place."""
    place = x.axis(label)
    new = tuple(sizes[c] for c in into)
    shape = (*x.array.shape[:place], *new, *x.array.shape[place + 1 :])
    return Labelled(x.array.reshape(shape), x.labels.replace(label, into))


def map_over(label: str, function: Callable, tree: Any, last: bool = False) -> Any:
    """Runs a function without a label, under `jax.vmap` over that label.

    Args:
      label: of the dim to map over; operands without it are passed whole.
      function: from a tree of Labelled to a tree of Labelled.
      tree: the operands.
      last: whether the mapped dim of the results comes last, not first.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_labelled)
    axes = [x.axis(label) if label in x.labels else None for x in leaves]
    inner = [x.labels.replace(label, "") for x in leaves]

    def run(*arrays):
        parts = [Labelled(*pair) for pair in zip(arrays, inner, strict=True)]
        return function(treedef.unflatten(parts))

    mapped = jax.vmap(run, in_axes=axes, out_axes=-1 if last else 0)
    found = mapped(*(x.array for x in leaves))

    def relabel(x):
        return Labelled(x.array, x.labels + label if last else label + x.labels)

    return jax.tree.map(relabel, found, is_leaf=is_labelled)


def _roles(a: Labelled, b: Labelled, out: str) -> tuple[str, str, str, str]:
    """Returns the batch, contracted, left-free and right-free labels."""
    shared = [c for c in a.labels if c in b.labels]
    batch = "".join(c for c in shared if c in out)
    summed = "".join(c for c in shared if c not in out)
    left = "".join(c for c in a.labels if c not in shared)
    right = "".join(c for c in b.labels if c not in shared)
    return batch, summed, left, right


def _dot_general(a: Labelled, b: Labelled, out: str, dtype) -> Labelled:
    batch, summed, left, right = _roles(a, b, out)
    numbers = (
        ([a.axis(c) for c in summed], [b.axis(c) for c in summed]),
        ([a.axis(c) for c in batch], [b.axis(c) for c in batch]),
    )
    array = jax.lax.dot_general(a.array, b.array, numbers, preferred_element_type=dtype)
    return moved(Labelled(array, batch + left + right), out)


def _matmul(a: Labelled, b: Labelled, out: str, dtype) -> Labelled:
    batch, summed, left, right = _roles(a, b, out)
    one, two = moved(a, batch + left + summed), moved(b, batch + summed + right)
    outer = one.array.shape[: len(batch)]
    rows = [a.size(c) for c in left]
    columns = [b.size(c) for c in right]
    length = 1
    for c in summed:
        length *= a.size(c)
    array = jnp.matmul(
        one.array.reshape(*outer, -1, length),
        two.array.reshape(*outer, length, -1),
        preferred_element_type=dtype,
    )
    array = array.reshape(*outer, *rows, *columns)
    return moved(Labelled(array, batch + left + right), out)


def _einsum(a: Labelled, b: Labelled, out: str, dtype) -> Labelled:
    text = f"{a.labels},{b.labels}->{out}"
    array = jnp.einsum(text, a.array, b.array, preferred_element_type=dtype)
    return Labelled(array, out)


def _swapped(a: Labelled, b: Labelled, out: str, dtype) -> Labelled:
    return _einsum(b, a, out, dtype)


def _vmapped(a: Labelled, b: Labelled, out: str, dtype) -> Labelled:
    batch, *_ = _roles(a, b, out)
    if not batch:
        return _dot_general(a, b, out, dtype)
    label = batch[-1]
    inner = out.replace(label, "")
    found = map_over(
        label,
        lambda pair: _vmapped(pair[0], pair[1], inner, dtype),
        (a, b),
        last=len(batch) > 1,
    )
    return moved(found, out)


def _summed(a: Labelled, b: Labelled, out: str, dtype) -> Labelled:
    batch, summed, left, right = _roles(a, b, out)
    order = batch + left + right + summed
    array = spread(a, order) * spread(b, order)
    array = array.sum(tuple(range(len(order) - len(summed), len(order))), dtype=dtype)
    return moved(Labelled(array, batch + left + right), out)


PRODUCTS: dict[str, Callable] = {
    "einsum": _einsum,
    "swapped": _swapped,
    "dot_general": _dot_general,
    "matmul": _matmul,
    "vmap": _vmapped,
    "summed": _summed,
}


def contract(style: str, a: Labelled, b: Labelled, out: str, dtype=None) -> Labelled:
    """Multiplies and sums over the shared labels that are not in `out`.

    Args:
      style: a key of PRODUCTS.
      a: left operand.
      b: right operand.
      out: labels of the result, in order.
      dtype: preferred element type.
    """
    return PRODUCTS[style](a, b, out, dtype)
