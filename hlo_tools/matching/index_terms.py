"""Indices of values as terms, so that shape operations disappear from a comparison.

A term is 0 (the index of a dimension of size one), a variable ("v", n), a mixed-radix
number ("lin", ((term, stride), ...)) or a digit of one ("digit", term, stride, size).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from jax.extend.mlir import ir

from hlo_tools.rewriting import int_list

type Term = Any
ZERO: Term = 0


def _joined(parts: Sequence[tuple[Term, int, int]]) -> Term:
    """Returns the number whose digits are (term, size, stride), highest first."""
    parts = [part for part in parts if part[1] != 1]
    if not parts:
        return ZERO
    if len(parts) == 1 and parts[0][2] == 1:
        return parts[0][0]
    bases = {part[0][1] if _is_digit(part[0]) else None for part in parts}
    if len(bases) == 1 and None not in bases:
        (base,) = bases
        digits = [(t[2], t[3]) for t, _, _ in parts]
        steps = [stride for stride, _ in digits]
        if steps == [s for _, _, s in parts] and digits[-1][0] == 1:
            # the highest digit of a number has no more than its size above it
            if parts[0][0][4]:
                return base
    return ("lin", tuple((term, size, stride) for term, size, stride in parts))


def _is_digit(term: Term) -> bool:
    return isinstance(term, tuple) and term[0] == "digit"


def _digit(number: Term, total: int, stride: int, size: int) -> Term:
    """Returns a digit of a number below `total`."""
    if size == 1:
        return ZERO
    if stride == 1 and size == total:
        return number
    if isinstance(number, tuple) and number[0] == "lin":
        inside = [
            (term, n, s // stride)
            for term, n, s in number[1]
            if s >= stride and s * n <= stride * size and s % stride == 0
        ]
        if inside and prod(n for _, n, _ in inside) == size:
            return _joined(inside)
    return ("digit", number, stride, size, stride * size == total)


def _groups(old: Sequence[int], new: Sequence[int]):
    """Yields runs of dimensions of equal size: (dims of old, dims of new)."""
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [], []
        a = b = 1
        while True:
            if a == b and left and right and a > 1:
                break
            if a <= b and i < len(old):
                a *= old[i]
                left.append(i)
                i += 1
            elif j < len(new):
                b *= new[j]
                right.append(j)
                j += 1
            elif i < len(old):
                a *= old[i]
                left.append(i)
                i += 1
            else:
                break
        yield left, right


def through_reshape(
    old: Sequence[int], new: Sequence[int], index: Sequence[Term]
) -> tuple[Term, ...]:
    """Returns the index into a reshape's operand for one into its result."""
    if 0 in old:
        return tuple(ZERO for _ in old)
    found: list[Term] = [ZERO] * len(old)
    for left, right in _groups(old, new):
        if [old[d] for d in left] == [new[d] for d in right]:
            for dim, other in zip(left, right, strict=True):
                found[dim] = index[other]
            continue
        parts, stride = [], 1
        for dim in reversed(right):
            parts.append((index[dim], new[dim], stride))
            stride *= new[dim]
        number, total, stride = _joined(parts[::-1]), stride, 1
        for dim in reversed(left):
            found[dim] = _digit(number, total, stride, old[dim])
            stride *= old[dim]
    return tuple(found)


def through_shape_op(op: ir.Operation, index: Sequence[Term]) -> tuple[Term, ...]:
    """Returns the index into the operand of a transpose, broadcast or reshape."""
    old, new = op.operands[0].type.shape, op.results[0].type.shape
    if op.name == "stablehlo.transpose":
        permutation = int_list(op, "permutation")
        return tuple(index[permutation.index(dim)] for dim in range(len(old)))
    if op.name == "stablehlo.broadcast_in_dim":
        dims = int_list(op, "broadcast_dimensions")
        return tuple(
            ZERO if size == 1 and new[dim] != 1 else index[dim]
            for size, dim in zip(old, dims, strict=True)
        )
    return through_reshape(old, new, index)


def variables(term: Term) -> frozenset[Any]:
    """Returns the variables of a term, sizes ignored."""
    if term == ZERO:
        return frozenset()
    if term[0] == "v":
        return frozenset([term])
    parts = [part[0] for part in term[1]] if term[0] == "lin" else [term[1]]
    return frozenset().union(*(variables(part) for part in parts))
