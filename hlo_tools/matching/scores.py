"""Takes the function applied to the scores apart into named pieces.

The argument of an attention's softmax is some function of the score S = q.k.
Most are  where(mask, softcap(scale * S) + bias, fill); the pieces are found by
walking from the root of the expression to S.  What does not fit is no failure:
the function is then used as it stands (``named`` is False).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hlo_tools.matching.expressions import Builder, Expr, is_float
from hlo_tools.matching.softmax import strip_converts

# A select or an addend at or below this takes a key out of the softmax.  With
# |scores| < 1e8 the exponential of the difference is exactly 0 in every type.
# float16 can not hold it; there its lowest finite value stands for it.
MASKED = -1e9
_MASKED_F16 = -6.0e4
# Below this a mask value absorbs any bias added to it, so that a row without any
# visible key still is a row of equal values.
_ABSORBING = -1e20


@dataclass
class Scores:
    """The pieces of  where(masks, softcap(scale * S) + biases, fill).

    Attributes:
      named: whether the pieces say everything.
      scale: factor of S, before the softcap.
      softcap: c of c * tanh(x / c), or None.
      biases: pairs (factor, expression) added after the softcap.
      masks: boolean expressions; a key is visible where all are true.
      fill: what a masked score is, or None.
      weakest_fill: the least of what each of the masks does to a score; or None.
      why: if not named, the operation that did not fit.
    """

    named: bool = True
    scale: float = 1.0
    softcap: float | None = None
    biases: list[tuple[float, Expr]] = field(default_factory=list)
    masks: list[Expr] = field(default_factory=list)
    fill: float | None = None
    weakest_fill: float | None = None
    why: str = ""


def _is_masked(expr: Expr) -> bool:
    if expr.kind != "const" or not is_float(expr.dtype):
        return False
    limit = _MASKED_F16 if expr.dtype == "f16" else MASKED
    return bool(expr.data <= limit)


def _booleans(expr: Expr) -> list[Expr]:
    """Returns the outermost boolean subexpressions."""
    found, seen, stack = [], set(), [expr]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.dtype == "i1" and node.kind != "const":
            found.append(node)
        else:
            stack.extend(node.args)
    return found


def _has_large_constant(expr: Expr) -> bool:
    return any(
        node.kind == "const" and is_float(node.dtype) and abs(float(node.data)) > 1e3
        for node in expr.walk()
    )


class _Unnamed(Exception):
    pass


class _Walk:
    def __init__(self, builder: Builder, score: Expr):
        self.builder, self.score = builder, score
        self.result = Scores()
        self.factor = 1.0  # product of the factors met so far
        self._holds: dict[int, bool] = {}

    def holds_score(self, expr: Expr) -> bool:
        """Returns whether `expr` depends on the score."""
        found = self._holds.get(id(expr))
        if found is None:
            found = expr is self.score or any(map(self.holds_score, expr.args))
            self._holds[id(expr)] = found
        return found

    def run(self, expr: Expr) -> None:
        while True:
            expr = strip_converts(expr)
            if expr is self.score:
                break
            if expr.kind != "op":
                raise _Unnamed(f"{expr.kind} instead of the score")
            step = self.mask_step(expr) or self.step(expr)
            if step is None:
                raise _Unnamed(f"{expr.name} of the scores")
            expr = step
        if self.result.softcap is None:
            self.result.scale = self.factor
        elif self.factor > 0:
            # cap * tanh(factor * S): the scale before c * tanh(x / c) is factor * c
            self.result.scale = self.factor * self.result.softcap
        else:
            raise _Unnamed("softcap of negated scores")

    def step(self, expr: Expr) -> Expr | None:
        """Peels one operation that is no mask; returns its score operand."""
        if expr.name in ("add", "subtract"):
            return self._addition(expr)
        if expr.name == "negate":
            self.factor = -self.factor
            return expr.args[0]
        if expr.name in ("multiply", "divide"):
            return self._product(expr)
        if expr.name == "tanh" and self.result.softcap is None and self.factor > 0:
            # what follows is the inside of the tanh: factors start afresh
            self.result.softcap, self.factor = self.factor, 1.0
            return expr.args[0]
        return None

    def _addition(self, expr: Expr) -> Expr | None:
        inner, other = expr.args
        sign = 1.0
        if not self.holds_score(inner):
            if expr.name == "subtract":
                return None
            inner, other = other, inner
        elif expr.name == "subtract":
            sign = -1.0
        if self.holds_score(other) or self.result.softcap is not None:
            return None  # a bias inside the tanh has no name
        masked = self._additive_mask(other, sign)
        if not masked and expr.dtype in ("f16", "bf16") and _has_large_constant(other):
            return None  # it may absorb the score in this type
        if not masked:
            self.result.biases.append((sign * self.factor, other))
        return inner

    def _additive_mask(self, addend: Expr, sign: float) -> bool:
        """Recognizes an addend that is 0 or a large negative number."""
        addend = strip_converts(addend)
        booleans = _booleans(addend)
        if len(booleans) != 1 or sign < 0 or self.factor <= 0:
            return False
        cases = [
            strip_converts(
                self.builder.substitute(
                    addend, booleans[0], self.builder.const(case, "i1")
                )
            )
            for case in (True, False)
        ]
        for visible, masked, mask in (
            (cases[0], cases[1], booleans[0]),
            (cases[1], cases[0], self.builder.invert(booleans[0])),
        ):
            if visible.is_const(0) and _is_masked(masked):
                # S + fill is one value over a row only if fill absorbs S
                self._add_mask(mask, masked, absorbs=float(masked.data) <= _ABSORBING)
                self._added = True
                return True
        return False

    def _add_mask(self, mask: Expr, fill: Expr, absorbs: bool) -> None:
        value = float(fill.data) * self.factor
        if self.result.fill is not None and not (
            np.isinf(value) == np.isinf(self.result.fill)
        ):
            raise _Unnamed("masks with infinite and with finite fill")
        self.result.masks.append(mask)
        several = self.result.fill is not None and value != self.result.fill
        # what an outer addend hid already is lowered twice: -inf stays -inf
        twice = self._added and np.isfinite(value)
        uncertain = self.result.biases and value > _ABSORBING
        if not absorbs or several or twice or uncertain:
            self.inexact_empty_rows = True
        self.result.fill = min(value, self.result.fill or value)
        self.result.weakest_fill = max(value, self.result.weakest_fill or value)

    inexact_empty_rows = False
    _added = False  # whether a mask was added on the way

    def _product(self, expr: Expr) -> Expr | None:
        inner, other = expr.args
        if not self.holds_score(inner):
            if expr.name == "divide":
                return None
            inner, other = other, inner
        other = strip_converts(other)
        if other.kind != "const":
            return None
        constant = float(other.data)
        if constant == 0 or not np.isfinite(constant):
            return None
        factor = constant if expr.name == "multiply" else 1.0 / constant
        self.factor *= factor
        return inner

    def mask_step(self, expr: Expr) -> Expr | None:
        """Peels  where(mask, x, fill)  in any spelling, by cases of the mask."""
        if self.result.softcap is not None or self.factor <= 0:
            return None
        booleans = _booleans(expr)
        if expr.name == "select":
            booleans = [expr.args[0]]
        for mask in booleans:
            if self.holds_score(mask):
                continue
            for case in (True, False):
                masked = self._case(expr, mask, not case)
                if not _is_masked(masked):
                    continue
                inner = self._case(expr, mask, case)
                if not self.holds_score(inner):
                    continue
                visible = mask if case else self.builder.invert(mask)
                self._add_mask(visible, masked, absorbs=True)
                return inner
        return None

    def _case(self, expr: Expr, mask: Expr, value: bool) -> Expr:
        constant = self.builder.const(value, "i1")
        return strip_converts(self.builder.substitute(expr, mask, constant))


def name_scores(builder: Builder, expr: Expr, score: Expr) -> tuple[Scores, bool]:
    """Takes `expr`, a function of `score`, apart.

    Returns:
      The pieces, and whether a row without a visible key is a row of equal
      values in the original too (so that its softmax is uniform).
    """
    walk = _Walk(builder, score)
    try:
        walk.run(expr)
    except _Unnamed as error:
        return Scores(named=False, why=str(error)), True
    return walk.result, not walk.inexact_empty_rows
