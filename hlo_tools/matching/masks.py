"""Decides what a boolean expression of positions alone lets through."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hlo_tools.matching.expressions import NUMPY_TYPES, Expr, fold
from hlo_tools.matching.index_space import Dim
from hlo_tools.matching.reader import table_of

# Largest grid of (query, key) pairs that is evaluated in full, when a mask is not
# a function of their distance alone.
_MAX_GRID = 1 << 26


@dataclass(frozen=True)
class Band:
    """Keys visible to query i: those j with lower <= j - i <= upper.

    None stands for no bound.
    """

    lower: int | None
    upper: int | None


def depends_on_positions_only(expr: Expr, rows: Dim, keys: Dim) -> bool:
    """Returns whether `expr` is a function of the query and key positions."""
    return all(
        node.kind in ("const", "op")
        or (node.kind == "iota" and node.index in ((rows,), (keys,)))
        or (
            node.kind == "leaf"
            and all(dim in ((), rows, keys) for dim in node.index)
            and table_of(node.value) is not None
        )
        for node in expr.walk()
    )


def _linear(expr: Expr, rows: Dim, keys: Dim):
    """Returns (a, b, c) if `expr` is a*query + b*key + c over integers, else None."""
    if expr.kind == "const":
        return 0, 0, int(expr.data)
    if expr.kind == "iota":
        return (1, 0, 0) if expr.index == (rows,) else (0, 1, 0)
    if expr.kind != "op" or not _is_signed_integer(expr.dtype):
        return None
    parts = [_linear(arg, rows, keys) for arg in expr.args]
    if any(part is None for part in parts):
        return None
    if expr.name == "convert" and expr.args[0].dtype != "i1":
        return parts[0]
    if expr.name == "negate":
        return tuple(-x for x in parts[0])
    if expr.name == "multiply":
        for one, other in (parts, parts[::-1]):
            if one[:2] == (0, 0):
                return tuple(one[2] * x for x in other)
        return None
    if expr.name in ("add", "subtract"):
        sign = 1 if expr.name == "add" else -1
        return tuple(x + sign * y for x, y in zip(*parts, strict=True))
    return None


def _is_signed_integer(dtype: str) -> bool:
    return dtype in ("i32", "i64")


def _depends_on_distance(expr: Expr, rows: Dim, keys: Dim) -> bool:
    """Returns whether `expr` is a function of key - query alone."""
    if expr.kind == "const":
        return True
    if expr.kind == "op" and expr.args:
        if _is_signed_integer(expr.dtype):
            line = _linear(expr, rows, keys)
            if line is not None and line[0] == -line[1]:
                return True
        if expr.name.startswith("compare.") and _is_signed_integer(expr.args[0].dtype):
            left, right = (_linear(arg, rows, keys) for arg in expr.args)
            if left is not None and right is not None:
                return left[0] - right[0] == right[1] - left[1]
        return all(_depends_on_distance(arg, rows, keys) for arg in expr.args)
    return False


def evaluate(expr: Expr, queries: np.ndarray, positions_of_keys: np.ndarray, rows: Dim):
    """Evaluates a function of positions with numpy; None if an op is unknown."""
    memo: dict[int, np.ndarray] = {}

    def visit(node: Expr):
        found = memo.get(id(node))
        if found is None:
            found = compute(node)
            memo[id(node)] = found
        return found

    def compute(node: Expr):
        if node.kind == "const":
            return node.data
        if node.kind == "iota":
            positions = queries if node.index == (rows,) else positions_of_keys
            return positions.astype(NUMPY_TYPES[node.dtype])
        if node.kind == "leaf":
            table = table_of(node.value)
            assert table is not None
            return table[
                tuple(
                    queries if dim == rows else positions_of_keys if dim else 0
                    for dim in node.index
                )
            ]
        args = [visit(arg) for arg in node.args]
        if any(arg is None for arg in args):
            return None
        if node.name == "select":
            return np.where(*args)
        if node.name == "convert":
            return np.asarray(args[0]).astype(NUMPY_TYPES[node.dtype])
        return _fold_array(node.name, node.dtype, args)

    return visit(expr)


def _fold_array(name: str, dtype: str, args):
    try:
        folded = fold(name, dtype, args)
    except (TypeError, ValueError):
        return None
    return None if folded is None else np.asarray(folded)


def band_of(expr: Expr, rows: Dim, keys: Dim, t: int, s: int) -> Band | None:
    """Returns the band that a mask of positions alone lets through.

    Args:
      expr: boolean expression, true where a key is visible.
      rows, keys: the query and key axes.
      t, s: their lengths.

    Returns:
      None if the mask is no band, or can not be evaluated; the proof is by
      evaluation over every distance (or every pair, for small grids).
    """
    if not depends_on_positions_only(expr, rows, keys):
        return None
    distances = np.arange(-(t - 1), s)
    if _depends_on_distance(expr, rows, keys):
        queries = np.maximum(-distances, 0)
        visible = evaluate(expr, queries, queries + distances, rows)
    elif t * s <= _MAX_GRID:
        visible = _distances_of_grid(expr, rows, t, s)
    else:
        return None
    if visible is None:
        return None
    visible = np.broadcast_to(visible, distances.shape)
    allowed = distances[visible]
    if not allowed.size or allowed.size != allowed[-1] - allowed[0] + 1:
        return None
    lower, upper = int(allowed[0]), int(allowed[-1])
    return Band(
        None if lower == distances[0] else lower,
        None if upper == distances[-1] else upper,
    )


def _distances_of_grid(expr: Expr, rows: Dim, t: int, s: int):
    """Returns visibility by distance if the full grid depends on it alone."""
    queries, keys = np.arange(t)[:, None], np.arange(s)[None, :]
    grid = evaluate(expr, queries, keys, rows)
    if grid is None:
        return None
    grid = np.broadcast_to(grid, (t, s))
    by_distance = np.zeros(t + s - 1, bool)
    by_distance[:t] = grid[::-1, 0]
    by_distance[t - 1 :] = grid[0, :]
    if not np.array_equal(grid, by_distance[(keys - queries) + t - 1]):
        return None
    return by_distance


def sees_a_key(band: Band, t: int, s: int) -> bool:
    """Returns whether every one of `t` queries sees at least one of `s` keys."""
    queries = np.arange(t)
    first = np.maximum(queries + (-t if band.lower is None else band.lower), 0)
    last = np.minimum(queries + (s if band.upper is None else band.upper), s - 1)
    return bool(np.all(first <= last))
