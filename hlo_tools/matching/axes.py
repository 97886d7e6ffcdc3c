"""Tells the axes of a site apart: batch, heads, queries, keys, features."""

from __future__ import annotations

from dataclasses import dataclass

from hlo_tools.matching.expressions import Expr
from hlo_tools.matching.index_space import Dim, atoms_of
from hlo_tools.matching.operands import Operand
from hlo_tools.matching.outcome import NoMatchError


@dataclass
class Axes:
    """The index atoms by role, each a tuple of atoms in canonical order."""

    batch: Dim
    kv_heads: Dim
    group: Dim
    rows: Dim
    keys: Dim
    depth: Dim
    value: Dim


def find_axes(
    q: Operand,
    k: Operand,
    v: Operand,
    depth: Dim,
    keys: Dim,
    values: Dim,
    p_index,
    scores: Expr,
    sides,
) -> Axes:
    """Names the axes of a site.

    Args:
      q, k, v: the operands.
      depth: contracted by the score product.
      keys: contracted by the value product.
      values: free in the values.
      p_index: index of the probabilities.
      scores: argument of the softmax.
      sides: (value, index) of the other arrays that the scores depend on.

    Raises:
      NoMatchError: they are no attention's.
    """
    q_atoms, k_atoms, v_atoms = (atoms_of(x.index) for x in (q, k, v))
    key_set, value_set = set(keys), set(values)
    if not set(depth) <= q_atoms & k_atoms or not key_set <= k_atoms & v_atoms:
        raise NoMatchError("an operand is constant along a contracted axis")
    if not value_set <= v_atoms:
        raise NoMatchError("the values are constant along their own axis")
    k_batch, v_batch = k_atoms - key_set - set(depth), v_atoms - key_set - value_set
    if k_batch != v_batch:
        raise NoMatchError("keys and values vary along different axes")
    if q_atoms & (key_set | value_set):
        raise NoMatchError("the queries vary along the key axis")
    out = {a for dim in p_index for a in dim} - key_set
    own = sorted(out - k_batch, key=lambda a: a.serial)
    rows = _query_axes(own, keys, scores, sides)
    group = tuple(a for a in own if a not in rows)
    batch, kv_heads = _split_batch(k, k_batch, keys, grouped=bool(group))
    return Axes(batch, kv_heads, group, rows, keys, depth, values)


def _split_batch(k: Operand, k_batch, keys: Dim, grouped: bool) -> tuple[Dim, Dim]:
    """Returns (batch, heads): any split is right, this one needs no transpose.

    The innermost axis is the head axis; alone, it is one if queries share its
    keys or if it varies faster than the keys ([S,H,D]).
    """
    order = [a for dim in k.index for a in dim]
    found = tuple(a for a in order if a in k_batch)
    inner = found and order.index(found[-1]) > order.index(keys[0])
    if len(found) > 1 or grouped or inner:
        return found[:-1], found[-1:]
    return found, ()


def _query_axes(own, keys: Dim, scores: Expr, sides) -> Dim:
    """Chooses which of the axes that only queries have is the query axis."""
    if len(own) <= 1:
        return tuple(own)
    for node in scores.walk():
        if node.kind == "iota" and set(node.index[0]) <= set(own):
            return node.index[0]
    for _, index in sides:
        atoms = atoms_of(index)
        shared = tuple(a for a in own if a in atoms)
        if atoms & set(keys) and 0 < len(shared) < len(own):
            return shared
    return (max(own, key=lambda a: (a.size, a.serial)),)
