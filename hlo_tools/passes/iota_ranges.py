"""Integer values that are a sum of positions and a constant, with proven ranges.

A mask of positions compares such values: `i + 3 >= j`. `linear` reads a value as
that sum, and gives up wherever an operation on the way could overflow; so the sum
holds over the integers, and a comparison of two of them may be solved for a
canonical form.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend.mlir import ir

from hlo_tools.passes.collapse_shapes import unit_map
from hlo_tools.passes.exact_arithmetic import integer_bounds
from hlo_tools.rewriting import (
    Rewriter,
    element_type,
    int_list,
    is_plain,
    producer,
    shape_of,
    splat_number,
)

_MAX_DEPTH = 16


@dataclass(frozen=True)
class Linear:
    """constant + the sum of sign * (position along dim), over the integers.

    Attributes:
      terms: (dim, sign) with signs that are not 0, dims increasing.
      extents: size of each dim of the value.
      constant: the constant.
    """

    terms: tuple[tuple[int, int], ...]
    extents: tuple[int, ...]
    constant: int

    def plus(self, other: Linear, sign: int) -> Linear:
        """Returns self + sign * other."""
        signs = dict(self.terms)
        for dim, factor in other.terms:
            signs[dim] = signs.get(dim, 0) + sign * factor
        terms = tuple(sorted((d, s) for d, s in signs.items() if s))
        return Linear(terms, self.extents, self.constant + sign * other.constant)

    def range(self) -> tuple[int, int]:
        """Returns the least and the largest value."""
        steps = [sign * (self.extents[dim] - 1) for dim, sign in self.terms]
        low = self.constant + sum(step for step in steps if step < 0)
        return low, self.constant + sum(step for step in steps if step > 0)

    def fits(self, kind: ir.Type) -> bool:
        """Returns whether every value can be held by an integer type."""
        least, largest = integer_bounds(kind)
        low, high = self.range()
        return least <= low and high <= largest

    def moved(self, where: dict[int, int], extents: tuple[int, ...]) -> Linear | None:
        """Returns the same with dim d called where[d], if all are there."""
        if any(dim not in where for dim, _ in self.terms):
            return None
        terms = tuple(sorted((where[dim], sign) for dim, sign in self.terms))
        return Linear(terms, extents, self.constant)


def linear(value: ir.Value, depth: int = _MAX_DEPTH) -> Linear | None:
    """Reads an integer value as a sum of positions and a constant.

    None if it is something else, or if an operation on the way could overflow.
    """
    shape = shape_of(value)
    if shape is None or depth == 0 or 0 in shape:
        return None
    kind = element_type(value)
    if not isinstance(kind, ir.IntegerType) or kind.width == 1:
        return None
    number = splat_number(value)
    if number is not None:
        return Linear((), shape, int(number))
    op = producer(value)
    if op is None or op.name not in _READERS or not is_plain(op):
        return None
    found = _READERS[op.name](op, shape, depth - 1)
    return found if found is not None and found.fits(kind) else None


def _iota(op: ir.Operation, shape: tuple[int, ...], depth: int) -> Linear | None:
    dim = op.attributes["iota_dimension"].value
    return Linear(((dim, 1),) if shape[dim] > 1 else (), shape, 0)


def _sum(op: ir.Operation, shape: tuple[int, ...], depth: int) -> Linear | None:
    left = linear(op.operands[0], depth)
    right = None if left is None else linear(op.operands[1], depth)
    if left is None or right is None:
        return None
    return left.plus(right, 1 if op.name == "stablehlo.add" else -1)


def _negate(op: ir.Operation, shape: tuple[int, ...], depth: int) -> Linear | None:
    inner = linear(op.operands[0], depth)
    return None if inner is None else Linear((), shape, 0).plus(inner, -1)


def _same(op: ir.Operation, shape: tuple[int, ...], depth: int) -> Linear | None:
    return linear(op.operands[0], depth)


def _broadcast(op: ir.Operation, shape: tuple[int, ...], depth: int) -> Linear | None:
    inner = linear(op.operands[0], depth)
    where = dict(enumerate(int_list(op, "broadcast_dimensions")))
    return None if inner is None else inner.moved(where, shape)


def _reshape(op: ir.Operation, shape: tuple[int, ...], depth: int) -> Linear | None:
    inner = linear(op.operands[0], depth)
    where = None if inner is None else unit_map(inner.extents, shape)
    if inner is None or where is None:
        return None
    return inner.moved(where, shape)


def _transpose(op: ir.Operation, shape: tuple[int, ...], depth: int) -> Linear | None:
    inner = linear(op.operands[0], depth)
    where = {old: new for new, old in enumerate(int_list(op, "permutation"))}
    return None if inner is None else inner.moved(where, shape)


_READERS = {
    "stablehlo.add": _sum,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.convert": _same,
    "stablehlo.iota": _iota,
    "stablehlo.negate": _negate,
    "stablehlo.reshape": _reshape,
    "stablehlo.subtract": _sum,
    "stablehlo.transpose": _transpose,
}


@dataclass(frozen=True)
class Comparison:
    """`position along left  direction  position along right + constant`.

    Attributes:
      left: a dim.
      direction: "EQ", "NE", "LT", "LE", "GT" or "GE".
      right: a larger dim, or None: compared with the constant alone.
      constant: the constant.
    """

    left: int
    direction: str
    right: int | None
    constant: int

    def is_made_by(self, op: ir.Operation) -> bool:
        """Returns whether a compare already has this form."""
        left, right = op.operands
        if not _is_iota(left, self.left):
            return False
        if self.right is None:
            return splat_number(right) == self.constant
        if self.constant == 0:
            return _is_iota(right, self.right)
        added = producer(right, "stablehlo.add")
        if added is None or not _is_iota(added.operands[0], self.right):
            return False
        return splat_number(added.operands[1]) == self.constant

    def operands(
        self, rewriter: Rewriter, shape: tuple[int, ...], kind: ir.Type
    ) -> tuple[ir.Value, ir.Value]:
        """Makes both sides."""
        left = rewriter.iota(shape, kind, self.left)
        if self.right is None:
            return left, rewriter.splat(self.constant, shape, kind)
        right = rewriter.iota(shape, kind, self.right)
        if self.constant:
            constant = rewriter.splat(self.constant, shape, kind)
            right = rewriter.create("stablehlo.add", [right, constant], right.type)
        return left, right


def _is_iota(value: ir.Value, dim: int) -> bool:
    op = producer(value, "stablehlo.iota")
    return op is not None and op.attributes["iota_dimension"].value == dim


def _always(direction: str, low: int, high: int) -> bool | None:
    """Returns what `x direction 0` is for all x from low to high, if it is one."""
    always = {
        "EQ": low == high == 0,
        "NE": low > 0 or high < 0,
        "LT": high < 0,
        "LE": high <= 0,
        "GT": low > 0,
        "GE": low >= 0,
    }
    inverse = {"EQ": "NE", "NE": "EQ", "LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT"}
    if always[direction]:
        return True
    return False if always[inverse[direction]] else None


def _one_strictness(direction: str, constant: int) -> tuple[str, int]:
    """Returns i >= j + c rather than i > j + c - 1, but never c = 1 or c = -1.

    So the common masks of positions have no constant: i >= j, i > j.
    """
    if constant and direction in ("GT", "LT"):
        constant += 1 if direction == "GT" else -1
        direction = "GE" if direction == "GT" else "LE"
    if (direction, constant) == ("GE", 1):
        return "GT", 0
    if (direction, constant) == ("LE", -1):
        return "LT", 0
    return direction, constant


def canonical_comparison(
    left: ir.Value, direction: str, right: ir.Value
) -> Comparison | bool | str | None:
    """Solves an integer comparison of positions.

    Returns:
      The canonical form; or True or False where it holds always or never; or a
      reason; or None if the sides are not sums of positions.
    """
    first = linear(left)
    second = None if first is None else linear(right)
    if first is None or second is None:
        return None
    form = first.plus(second, -1)
    known = _always(direction, *form.range())
    if known is not None:
        return known
    signs = [sign for _, sign in form.terms]
    if signs not in ([1], [-1], [1, -1], [-1, 1]):
        return "not a difference of two positions"
    constant = -form.constant
    if signs[0] == -1:
        constant = -constant
        swapped = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}
        direction = swapped.get(direction, direction)
    direction, constant = _one_strictness(direction, constant)
    dims = [dim for dim, _ in form.terms]
    other = ((dims[1], 1),) if len(dims) == 2 else ()
    sides = Linear(other, form.extents, constant), Linear((), (), constant)
    if not all(side.fits(element_type(left)) for side in sides):
        return "the constant could overflow on the other side"
    return Comparison(dims[0], direction, dims[1] if other else None, constant)
