"""Compares a traced reference with values of a program, operation by operation.

Both sides are read with the same index variables, so transposes, reshapes and
broadcasts vanish; products and sums are compared as such, in any order.

There are two ways to compare. A loose one ignores sizes, constants and converts: it
only says what the reference's arguments may be. A strict one, of a reference traced
anew for exactly those arguments, ignores nothing, and is the proof.

Length: the comparison is one mutual recursion with backtracking.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools.matching.index_terms import ZERO, Term, through_shape_op, variables
from hlo_tools.matching.reader import is_plain_sum, loop_invariant, reducer_of
from hlo_tools.rewriting import (
    ELEMENTWISE,
    element_type,
    int_list,
    is_plain,
    producer,
    shape_of,
    splat_number,
)

_SHAPE = frozenset(
    {"stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.transpose"}
)
_SWAPPED = frozenset(f"stablehlo.{n}" for n in "maximum minimum and or xor".split())
_PRODUCT = frozenset(
    f"stablehlo.{n}" for n in "multiply divide negate rsqrt sqrt".split()
)
_SUM = frozenset(f"stablehlo.{n}" for n in "add subtract".split())
_MOST_TERMS = 8  # of a sum that a gradient may be a part of
_BUDGET = 20_000  # comparisons before a candidate is given up
type Index = tuple[Term, ...]
type Place = tuple[Any, Index]


@dataclass
class Difference:
    """Where a comparison got furthest before it failed."""

    matched: int = 0
    value: Any = None
    got: str = ""
    expected: str = ""


class BudgetError(Exception):
    """A comparison has too many ways to go."""


def _is_number(value: Any) -> bool:
    return splat_number(value) is not None


def _is_float(value: Any) -> bool:
    return isinstance(element_type(value), ir.FloatType)


def _name(value: Any) -> str:
    op = producer(value)
    return "an argument" if op is None else op.name


class Unifier:
    """One comparison of a reference with a program.

    Args:
      strict: whether sizes, constants and converts count.
      bound: argument number -> value of the program, where known.

    Attributes:
      bound: with what the comparison found.
      difference: where it got furthest.
    """

    def __init__(self, strict: bool, bound: dict[int, Any] | None = None):
        self.strict = strict
        self.bound: dict[int, Any] = dict(bound or {})
        self.pairs: dict[tuple, list] = {}
        self.difference = Difference()
        self._steps = 0
        self._made: dict[Any, Any] = {}
        self._numbers: dict[tuple, int] = {}

    def members(self) -> set:
        """Returns the program's values that the comparison went through."""
        return {value for values in self.pairs.values() for value in values}

    def roots(self, pattern: Any, program: Any) -> Iterator[None]:
        """Yields for each way in which a value equals an output of the reference."""
        left, right = shape_of(pattern), shape_of(program)
        if left is None or right is None or (self.strict and left != right):
            return
        if self.strict and not self._same_type(pattern, program):
            return
        if len(left) != len(right):
            return
        index = self._fresh(("root",), left if self.strict else [2] * len(left))
        yield from self.values(pattern, index, program, index)

    def some_terms(self, p: Any, g: Any) -> Iterator[list[Any]]:
        """Yields terms of a sum `g` that together equal all terms of a sum `p`."""
        sizes = shape_of(p) if self.strict else [2] * len(shape_of(p) or ())
        index = self._fresh(("root",), sizes)
        (c, left), (d, right) = self._terms(p, index), self._terms(g, index)
        right = [t for t in right if t[3] == index and t[0] == 1]
        if c or d or not 2 < len(right) <= _MOST_TERMS:
            return
        for count in range(min(len(right) - 1, len(left)), 0, -1):
            for picked in itertools.combinations(right, count):
                for _ in self._like_terms(left, list(picked), p):
                    yield [value for _, _, value, _ in picked]

    # ------------------------------------------------------------------ one value

    def values(self, p: Any, pi: Index, g: Any, gi: Index) -> Iterator[None]:
        """Yields for each way in which two values are equal; undone after it."""
        self._steps += 1
        if self._steps > _BUDGET:
            raise BudgetError
        (pb, pbi), chain = self._strip(p, pi)[-1], self._strip(g, gi)
        if isinstance(pb, ir.BlockArgument):
            yield from self._bind(pb.arg_number, pbi, chain)
            return
        gb, gbi = chain[-1]
        key = (pb, pbi, gb, gbi)
        if key in self.pairs:
            yield
            return
        found = False
        for _ in self._bodies(pb, pbi, gb, gbi):
            found = True
            self.pairs[key] = [value for value, _ in chain]
            yield
            self.pairs.pop(key, None)
        if not found and len(self.pairs) >= self.difference.matched:
            self.difference = Difference(len(self.pairs), gb, _name(gb), _name(pb))

    def _strip(self, value: Any, index: Index) -> list[Place]:
        """Returns a value and what it only rearranges, innermost last."""
        chain = [(loop_invariant(value), index)]
        while True:
            value, index = chain[-1]
            op = producer(value)
            if op is None or shape_of(value) is None:
                return chain
            if op.name in _SHAPE and is_plain(op):
                index = through_shape_op(op, index)
            elif op.name == "stablehlo.reduce" and sums_nothing(op):
                dims = int_list(op, "dimensions")
                index = _insert(index, dims, [ZERO] * len(dims))
            elif self.strict or op.name != "stablehlo.convert":
                return chain
            chain.append((loop_invariant(op.operands[0]), index))

    def _bind(self, number: int, index: Index, chain: list[Place]) -> Iterator[None]:
        key = ("argument", number, index, chain[0])
        inside = [value for value, _ in chain[:-1]]
        if number in self.bound:
            base, at = self._strip(self.bound[number], index)[-1]
            if base == chain[-1][0] and self._same_index(at, chain[-1][1]):
                fresh = key not in self.pairs
                self.pairs[key] = inside
                yield
                if fresh:
                    self.pairs.pop(key, None)
            return
        if self.strict:
            return
        for value, at in chain:
            if len(at) == len(index) and self._same_index(at, index):
                self.bound[number], self.pairs[key] = value, inside
                yield
                del self.bound[number]
                self.pairs.pop(key, None)
        for value, at in chain:
            sizes = shape_of(value) or ()
            kept = tuple(t for t, n in zip(at, sizes, strict=True) if n != 1)
            if len(at) != len(index) == len(kept) and self._same_index(kept, index):
                self.bound[number] = self._squeezed(value)
                yield
                del self.bound[number]

    def _squeezed(self, value: Any) -> Any:
        """Makes a value without its dimensions of size one, as an argument may be."""
        if value not in self._made:
            op = producer(value)
            block = value.owner if op is None else op.block
            first = next(iter(block.operations))
            point = (
                ir.InsertionPoint(first) if op is None else ir.InsertionPoint.after(op)
            )
            sizes = [n for n in value.type.shape if n != 1]
            kind = ir.RankedTensorType.get(sizes, element_type(value))
            with point, first.location:
                self._made[value] = stablehlo.ReshapeOp(kind, value).result
        return self._made[value]

    def _same_index(self, left: Index, right: Index) -> bool:
        if self.strict:
            return left == right
        return len(left) == len(right) and all(
            a == b or variables(a) == variables(b)
            for a, b in zip(left, right, strict=True)
        )

    def _same_type(self, p: Any, g: Any) -> bool:
        return str(element_type(p)) == str(element_type(g))

    def _fresh(self, key: tuple, sizes: Any) -> Index:
        """Returns index variables for dimensions; the same for the same key."""
        found = []
        for place, size in enumerate(sizes):
            number = self._numbers.setdefault((*key, place), len(self._numbers))
            found.append(ZERO if size == 1 and self.strict else ("v", number))
        return tuple(found)

    # ------------------------------------------------------------------ operations

    def _bodies(self, p: Any, pi: Index, g: Any, gi: Index) -> Iterator[None]:
        a, b = producer(p), producer(g)
        if a is None or b is None or shape_of(g) is None:
            return
        if self.strict and not self._same_type(p, g):
            return
        if _is_number(p) or _is_number(g):
            if self._same_number(p, g):
                yield
            return
        if a.name == b.name and self._plain(b):
            yield from self._same_name(a, p, pi, b, g, gi)
        if _is_float(p) and _is_float(g):
            if a.name in _SUM and b.name in _SUM:
                yield from self._sums(p, pi, g, gi)
            elif a.name in _PRODUCT and b.name in _PRODUCT:
                yield from self._products(p, pi, g, gi)

    def _plain(self, op: ir.Operation) -> bool:
        known = op.name in ELEMENTWISE or op.name in _SHAPE
        return is_plain(op) if known else "mhlo.sharding" not in op.attributes

    def _same_number(self, p: Any, g: Any) -> bool:
        left, right = splat_number(p), splat_number(g)
        if left is None or right is None:
            return False
        return not self.strict or left == right or (left != left and right != right)

    def _same_name(self, a, p, pi, b, g, gi) -> Iterator[None]:
        name = a.name
        if name in ELEMENTWISE:
            if self._attributes(a) == self._attributes(b):
                yield from self._elementwise(a, pi, b, gi)
        elif name == "stablehlo.iota":
            dim, other = (int(ir.IntegerAttr(o.attributes["iota_dimension"]).value)
                          for o in (a, b))  # fmt: skip
            if self._same_index((pi[dim],), (gi[other],)):
                yield
        elif name == "stablehlo.reduce":
            yield from self._reduce(a, p, pi, b, gi)
        elif name == "stablehlo.dot_general":
            yield from self._dot(a, p, pi, b, gi)
        else:
            yield from self._opaque(a, p, pi, b, g, gi)

    def _attributes(self, op: ir.Operation) -> dict[str, str]:
        return {name: str(op.attributes[name]) for name in op.attributes.keys()}

    def _elementwise(self, a, pi, b, gi) -> Iterator[None]:
        left, right = list(a.operands), list(b.operands)
        if len(left) != len(right):
            return
        orders = [right]
        name = a.name
        both = name in _SWAPPED | {"stablehlo.add", "stablehlo.multiply"}
        if name == "stablehlo.compare":
            both = any(w in str(a.attributes["comparison_direction"]) for w in
                       ("EQ", "NE"))  # fmt: skip
        if both:
            orders.append(right[::-1])

        def at(value, index):
            return index if len(value.type.shape) else ()

        for order in orders:
            yield from self._all(
                [(x, at(x, pi), y, at(y, gi)) for x, y in zip(left, order, strict=True)]
            )

    def _all(self, todo: list[tuple]) -> Iterator[None]:
        if not todo:
            yield
            return
        for _ in self.values(*todo[0]):
            yield from self._all(todo[1:])

    def _reduce(self, a, p, pi, b, gi) -> Iterator[None]:
        kind = reducer_of(a)
        if kind is None or kind != reducer_of(b):
            return
        dims, others = int_list(a, "dimensions"), int_list(b, "dimensions")
        if len(dims) != len(others):
            return
        sizes = [a.operands[0].type.shape[dim] for dim in dims]
        new = self._fresh(("reduce", p, pi), sizes)
        init = (a.operands[1], (), b.operands[1], ())
        for order in itertools.permutations(range(len(dims))):
            found = [b.operands[0].type.shape[others[place]] for place in order]
            if self.strict and sorted(sizes) != sorted(found):
                return
            inverse = [0] * len(order)
            for place, number in enumerate(order):
                inverse[number] = place
            if self.strict and [sizes[i] for i in inverse] != [
                b.operands[0].type.shape[d] for d in others
            ]:
                continue
            left = _insert(pi, dims, new)
            right = _insert(gi, others, [new[i] for i in inverse])
            yield from self._all([init, (a.operands[0], left, b.operands[0], right)])

    def _dot(self, a, p, pi, b, gi) -> Iterator[None]:
        kept = ("precision_config", "algorithm")
        left, right = self._attributes(a), self._attributes(b)
        if any(left.get(name) != right.get(name) for name in kept):
            return
        numbers, others = _dot_numbers(a), _dot_numbers(b)
        if len(numbers[2]) != len(others[2]):
            return
        sizes = [a.operands[0].type.shape[d] for d in numbers[2]]
        new = self._fresh(("dot", p, pi), sizes)
        x, y = _dot_indices(a, numbers, pi, new)
        for order in itertools.permutations(new):
            found = [b.operands[0].type.shape[d] for d in others[2]]
            ordered = [sizes[new.index(term)] for term in order]
            if self.strict and found != ordered:
                continue
            u, v = _dot_indices(b, others, gi, order)
            first, second = b.operands
            yield from self._all(
                [(a.operands[0], x, first, u), (a.operands[1], y, second, v)]
            )
            yield from self._all(
                [(a.operands[0], x, second, v), (a.operands[1], y, first, u)]
            )

    def _opaque(self, a, p, pi, b, g, gi) -> Iterator[None]:
        """Compares operations that are not read: all about them must be equal."""
        if len(a.results) != 1 or len(a.operands) != len(b.operands):
            return
        if len(b.results) != 1 or not self._same_index(pi, gi):
            return
        if self.strict:
            same = str(p.type) == str(g.type)
            if not same or self._attributes(a) != self._attributes(b):
                return
            if _bodies_text(a) != _bodies_text(b) or _bodies_text(b) is None:
                return
        todo = []
        for number, (x, y) in enumerate(zip(a.operands, b.operands, strict=True)):
            left, right = shape_of(x), shape_of(y)
            if left is None or right is None or len(left) != len(right):
                return
            if self.strict and left != right:
                return
            index = self._fresh(("opaque", p, pi, number), left)
            todo.append((x, index, y, index))
        yield from self._all(todo)

    # ------------------------------------------------------------ sums and products

    def _products(self, p: Any, pi: Index, g: Any, gi: Index) -> Iterator[None]:
        (c, left), (d, right) = self._factors(p, pi), self._factors(g, gi)
        if len(left) == len(right) and self._close(c, d, p):
            yield from self._any_order(left, right)

    def _factors(self, value: Any, index: Index) -> tuple[float, list]:
        """Returns a coefficient and factors (power, "", value, index).

        A square root is the power of one half; powers of one value are added up.
        """
        coefficient, powers = 1.0, {}
        arguments = {self._strip(v, self._any(v))[-1][0] for v in self.bound.values()}
        todo = [(value, index, 1.0)]
        while todo:
            one, at, power = todo.pop()
            base, at = self._strip(one, at)[-1]
            op, number = producer(base), splat_number(base)
            plain = op is not None and is_plain(op) and base not in arguments
            name = op.name if op is not None and plain else None
            if number is not None and (number != 0 or power > 0):
                coefficient *= float(number) ** power
            elif op is None or name is None:
                powers[base, at] = powers.get((base, at), 0) + power
            elif name in ("stablehlo.multiply", "stablehlo.divide"):
                second = power if name == "stablehlo.multiply" else -power
                todo += [(op.operands[1], at, second), (op.operands[0], at, power)]
            elif name == "stablehlo.negate":
                coefficient = -coefficient if power % 2 == 1 else coefficient
                todo.append((op.operands[0], at, power))
            elif name in ("stablehlo.rsqrt", "stablehlo.sqrt"):
                half = power / 2 if name == "stablehlo.sqrt" else -power / 2
                root = self._strip(op.operands[0], at)[-1]
                powers[root] = powers.get(root, 0) + half
            else:
                powers[base, at] = powers.get((base, at), 0) + power
        return coefficient, [(n, "", *place) for place, n in powers.items()]

    def _any(self, value: Any) -> Index:
        return tuple(ZERO for _ in shape_of(value) or ())

    def _sums(self, p: Any, pi: Index, g: Any, gi: Index) -> Iterator[None]:
        (c, left), (d, right) = self._terms(p, pi), self._terms(g, gi)
        if not self._close(c, d, p):
            return
        if len(left) == len(right) > 1:
            yield from self._any_order(left, right)
        yield from self._like_terms(left, right, p)

    def _like_terms(self, left: list, right: list, value: Any) -> Iterator[None]:
        """Compares sums of products, with terms of equal factors added up."""
        mine, yours = self._collected(left), self._collected(right)
        if len(mine) == len(yours):
            yield from self._assign_products(mine, yours, value)

    def _collected(self, terms: list) -> list[tuple[float, list]]:
        found: dict[frozenset, tuple[float, list]] = {}
        for sign, _, value, index in terms:
            number, factors = self._factors(value, index)
            key = frozenset(factors)
            found[key] = found.get(key, (0.0, factors))[0] + sign * number, factors
        return list(found.values())

    def _assign_products(self, left: list, right: list, value: Any) -> Iterator[None]:
        if not left:
            yield
            return
        number, factors = left[0]
        for place, (other, more) in enumerate(right):
            if len(factors) != len(more) or not self._close(number, other, value):
                continue
            for _ in self._any_order(factors, more):
                rest = right[:place] + right[place + 1 :]
                yield from self._assign_products(left[1:], rest, value)

    def _terms(self, value: Any, index: Index) -> tuple[float, list]:
        """Returns a constant and terms (sign, "", value, index)."""
        constant, found = 0.0, []
        todo = [(value, index, 1)]
        while todo:
            one, at, sign = todo.pop()
            base, at = self._strip(one, at)[-1]
            op, number = producer(base), splat_number(base)
            if number is not None:
                constant += sign * float(number)
            elif op is not None and op.name in _SUM and is_plain(op):
                second = sign if op.name == "stablehlo.add" else -sign
                todo += [(op.operands[1], at, second), (op.operands[0], at, sign)]
            else:
                found.append((sign, "", base, at))
        return constant, found

    def _close(self, left: float, right: float, value: Any) -> bool:
        """Compares coefficients that were multiplied together in another order."""
        if not self.strict or left == right:
            return True
        wide = str(element_type(value)) == "f64"
        eps = float(np.finfo(np.float64 if wide else np.float32).eps)
        return abs(left - right) <= 2 * eps * max(abs(left), abs(right))

    def _any_order(self, left: list, right: list) -> Iterator[None]:
        # structure first: it tells what the arguments are
        left = sorted(left, key=lambda f: isinstance(f[2], ir.BlockArgument))
        yield from self._assign(left, right)

    def _assign(self, left: list, right: list) -> Iterator[None]:
        if not left:
            yield
            return
        power, kind, value, index = left[0]
        for number, (other, kind2, g, gi) in enumerate(right):
            if (power, kind) != (other, kind2):
                continue
            for _ in self.values(value, index, g, gi):
                yield from self._assign(left[1:], right[:number] + right[number + 1 :])


def sums_nothing(op: ir.Operation) -> bool:
    """Returns whether a sum is over dimensions of size one only."""
    shape = op.operands[0].type.shape
    return all(shape[d] == 1 for d in int_list(op, "dimensions")) and is_plain_sum(op)


def _bodies_text(op: ir.Operation) -> str | None:
    """Returns what the regions of an operation compute; None if they read outside."""
    found = []
    for region in op.regions:
        for block in region.blocks:
            known: dict[Any, str] = {
                value: f"a{n}" for n, value in enumerate(block.arguments)
            }
            for one in block.operations:
                if list(one.operation.regions):
                    return None
                if any(value not in known for value in one.operands):
                    return None
                operands = [known[value] for value in one.operands]
                attributes = one.operation.attributes
                text = {name: str(attributes[name]) for name in attributes.keys()}
                types = [str(r.type) for r in one.results]
                found.append(
                    f"{one.operation.name}{operands}{sorted(text.items())}{types}"
                )
                for result in one.results:
                    known[result] = f"v{len(known)}"
    return "\n".join(found)


def _insert(index: Index, dims: Any, new: Any) -> Index:
    rest, added = iter(index), dict(zip(dims, new, strict=True))
    return tuple(
        added[dim] if dim in added else next(rest)
        for dim in range(len(index) + len(dims))
    )


def _dot_numbers(op: ir.Operation) -> tuple[list[int], ...]:
    """Returns batch and contracting dimensions: left, right, left, right."""
    found = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    return (
        list(found.lhs_batching_dimensions),
        list(found.rhs_batching_dimensions),
        list(found.lhs_contracting_dimensions),
        list(found.rhs_contracting_dimensions),
    )


def _dot_indices(op, numbers, index: Index, new: Any) -> tuple[Index, Index]:
    batch, other_batch, contracted, other_contracted = numbers
    rest = list(index[len(batch) :])
    sides = []
    for operand, batches, sums in (
        (op.operands[0], batch, contracted),
        (op.operands[1], other_batch, other_contracted),
    ):
        known = dict(zip(batches, index, strict=False))
        known.update(zip(sums, new, strict=True))
        sides.append(
            tuple(
                known[dim] if dim in known else rest.pop(0)
                for dim in range(len(operand.type.shape))
            )
        )
    return sides[0], sides[1]
