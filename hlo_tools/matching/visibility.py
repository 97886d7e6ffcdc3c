"""Tells which keys a query sees: by position (a band) and by data (masks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hlo_tools.composites import GUARDED_FILL
from hlo_tools.matching.expressions import Builder, Expr
from hlo_tools.matching.index_space import dim_size
from hlo_tools.matching.masks import Band, band_of, sees_a_key
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.scores import Scores, name_scores

if TYPE_CHECKING:
    from hlo_tools.matching.attention import AttentionMatch


def name_pieces(builder: Builder, match: AttentionMatch) -> None:
    """Fills in what the scores of a match consist of.

    Sets ``pieces``, ``band``, ``data_masks``, ``rows_never_empty``, ``guarded``.
    """
    pieces, uniform = name_scores(builder, match.scores, match.score)
    axes = match.axes
    t, s = dim_size(axes.rows), dim_size(axes.keys)
    band, data_masks = Band(None, None), []
    for mask in pieces.masks:
        for part in _conjuncts(mask):
            found = band_of(part, axes.rows, axes.keys, t, s)
            if found is None:
                data_masks.append(part)
            else:
                band = _intersection(band, found)
    never_empty = not data_masks and sees_a_key(band, t, s)
    why = ""
    if pieces.named and not never_empty and not uniform:
        why = "a row without visible keys would depend on the mask's exact value"
    if pieces.named and not _are_mild(match, pieces):
        why = "a bias of unknown size may hide every key that the mask leaves"
    match.pieces = pieces
    if pieces.named:
        match.band, match.data_masks = band, data_masks
        match.rows_never_empty = never_empty
    if why:
        guard(match, why)


def guard(match: AttentionMatch, why: str) -> None:
    """Limits the names of a match to inputs where every query sees a key.

    The names go where no input is like that, or a mask is not low enough to tell.

    Args:
      match: a named one; changed.
      why: what rows without a key do, as a sentence.
    """
    axes, pieces = match.axes, match.pieces
    sizes = dim_size(axes.rows), dim_size(axes.keys)
    assert match.band is not None
    low = pieces.weakest_fill is None or pieces.weakest_fill <= GUARDED_FILL
    match.guarded = low and sees_a_key(match.band, *sizes)
    if not match.guarded:
        match.pieces = Scores(named=False, why=why)
        match.band, match.data_masks, match.rows_never_empty = None, [], False


def _are_mild(match: AttentionMatch, pieces: Scores) -> bool:
    return all(_is_mild(expr, match.score) for _, expr in pieces.biases)


def require_visible_keys(match: AttentionMatch) -> None:
    """Refuses rows without keys where the maximum is not subtracted.

    There exp gives 0 for every key, and the program 0 / 0.
    """
    pieces = match.pieces
    if pieces.named and match.rows_never_empty:
        if _are_mild(match, pieces):
            return
    elif not pieces.named and _is_mild(match.scores, match.score):
        return
    raise NoMatchError(
        "the softmax does not subtract the maximum of its scores, and a row of very "
        "low scores would be 0 / 0",
        near=True,
        value=match.score.value,
        got="an exponential of scores that are not shifted by their own maximum",
        expected="exp(x - max(x)) along the keys",
        edit="use jax.nn.softmax, or subtract the maximum of the masked scores",
    )


def _is_mild(expr: Expr, score: Expr) -> bool:
    """Returns whether an expression has no input and no number of a mask's size."""
    return all(
        node is score
        or node.kind in ("op", "iota")
        or (node.kind == "const" and abs(float(node.data)) <= 1e3)
        for node in expr.walk()
    )


def _intersection(one: Band, other: Band) -> Band:
    lowers = [b.lower for b in (one, other) if b.lower is not None]
    uppers = [b.upper for b in (one, other) if b.upper is not None]
    return Band(max(lowers, default=None), min(uppers, default=None))


def _conjuncts(mask: Expr) -> list[Expr]:
    if mask.kind == "op" and mask.name == "and":
        return [part for arg in mask.args for part in _conjuncts(arg)]
    return [mask]
