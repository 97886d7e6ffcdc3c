"""Scalar expressions over an index space, hash-consed and lightly simplified.

An expression says what one element of a value is, as a function of the index
atoms.  Equal expressions are the same object, so "the sum is over these very
exponentials" is an identity test.  The simplifications made here are exact for
the values that a pattern may assume (finite inputs); they exist so that two
spellings of one mask meet in one form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from hlo_tools.matching.index_space import Atom, Index, atoms_of

_FLOATS = {"f64": np.float64, "f32": np.float32, "f16": np.float16}
_FLOATS["bf16"] = ml_dtypes.bfloat16
_INTEGERS = {
    **{f"i{n}": np.dtype(f"int{n}").type for n in (8, 16, 32, 64)},
    **{f"ui{n}": np.dtype(f"uint{n}").type for n in (8, 16, 32, 64)},
    "i1": np.bool_,
}
NUMPY_TYPES: dict[str, Any] = {**_FLOATS, **_INTEGERS}


def is_float(dtype: str) -> bool:
    """Returns whether an MLIR element type name is a floating point type."""
    return dtype in _FLOATS


class Expr:
    """One node; build it with `Builder`, never directly.

    Attributes:
      kind: "const", "iota", "leaf", "dot", "reduce" or "op".
      name: for "op" the operation, with its direction for comparisons
        ("compare.GE"); for "reduce" the reducer ("add", "maximum").
      args: operand expressions ("op"), else empty.
      data: the constant (numpy scalar), the index (iota), or (value, index).
      dtype: MLIR element type name.
      atoms: the index atoms that the expression varies with.
    """

    __slots__ = ("args", "atoms", "data", "dtype", "kind", "name", "serial")

    def __init__(self, kind, name, args, data, dtype, atoms, serial):
        self.kind, self.name, self.args = kind, name, args
        self.data, self.dtype, self.atoms, self.serial = data, dtype, atoms, serial

    def __repr__(self) -> str:
        if self.kind == "const":
            return f"{self.data!s}"
        if self.kind == "op":
            return f"{self.name}({', '.join(map(repr, self.args))})"
        return f"{self.kind}{sorted(self.atoms, key=lambda a: a.serial)}"

    @property
    def value(self):
        """The index-carrying value of a leaf, dot or reduce node."""
        return self.data[0]

    @property
    def index(self) -> Index:
        """The index at which a leaf, dot, reduce or iota node is read."""
        return self.data if self.kind == "iota" else self.data[1]

    def is_const(self, value: Any = None) -> bool:
        """Returns whether this is a constant (equal to `value`, if given)."""
        return self.kind == "const" and (value is None or bool(self.data == value))

    def walk(self) -> Iterator[Expr]:
        """Yields every node below and including this one, once each."""
        seen, stack = set(), [self]
        while stack:
            node = stack.pop()
            if id(node) not in seen:
                seen.add(id(node))
                yield node
                stack.extend(node.args)


def fold(name: str, dtype: str, values: list[Any]):
    """Evaluates an operation on constants, or returns None."""
    functions = {
        "add": np.add, "subtract": np.subtract, "multiply": np.multiply,
        "divide": np.divide, "maximum": np.maximum, "minimum": np.minimum,
        "negate": np.negative, "sqrt": np.sqrt, "abs": np.abs,
        "rsqrt": lambda x: type(x)(1) / np.sqrt(x), "exponential": np.exp,
        "log": np.log, "power": np.power, "tanh": np.tanh,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        "not": np.invert, "compare.EQ": np.equal, "compare.NE": np.not_equal,
        "compare.LT": np.less, "compare.LE": np.less_equal,
        "compare.GT": np.greater, "compare.GE": np.greater_equal,
    }  # fmt: skip
    if name == "divide" and not is_float(dtype):
        return None  # integer division rounds to zero; not needed
    if name == "convert":
        with np.errstate(all="ignore"):
            return NUMPY_TYPES[dtype](values[0])
    if name not in functions:
        return None
    with np.errstate(all="ignore"):
        return NUMPY_TYPES[dtype](functions[name](*values))


_INVERSE = {"EQ": "NE", "NE": "EQ", "LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT"}


class Builder:
    """Makes expressions; equal ones are the same object within one builder."""

    def __init__(self):
        self._nodes: dict[Any, Expr] = {}

    def _make(self, kind, name, args, data, key, dtype, atoms) -> Expr:
        full_key = (kind, name, tuple(id(arg) for arg in args), key, dtype)
        node = self._nodes.get(full_key)
        if node is None:
            node = Expr(kind, name, args, data, dtype, atoms, len(self._nodes))
            self._nodes[full_key] = node
        return node

    def const(self, value: Any, dtype: str) -> Expr:
        with np.errstate(all="ignore"):
            value = NUMPY_TYPES[dtype](value)
        return self._make("const", "", (), value, value.tobytes(), dtype, frozenset())

    def iota(self, dim: tuple[Atom, ...], dtype: str) -> Expr:
        if not dim:
            return self.const(0, dtype)
        return self._make("iota", "", (), (dim,), (dim,), dtype, frozenset(dim))

    def read(self, kind: str, value: Any, index: Index, dtype: str) -> Expr:
        """Returns a "leaf" or "dot": `value` at `index`."""
        key = (value, index)
        return self._make(kind, "", (), key, key, dtype, atoms_of(index))

    def reduce(
        self,
        name: str,
        operand: Any,
        inner: Index,
        dims: tuple[int, ...],
        result: tuple[Any, Index],
        dtype: str,
    ) -> Expr:
        """Returns `operand` reduced over `dims`.

        Args:
          name: the reducer.
          operand: what is reduced, read at `inner` (reduced dims: ()).
          dims: the reduced dimensions of `operand`.
          result: the value of the reduction and the index it is read at.
          dtype: element type.
        """
        data = (*result, operand, inner, dims)
        key = (operand, inner, dims)
        return self._make("reduce", name, (), data, key, dtype, atoms_of(inner))

    def op(self, name: str, args: tuple[Expr, ...], dtype: str) -> Expr:
        """Returns the (simplified) application of an elementwise operation."""
        if all(arg.kind == "const" for arg in args):
            folded = fold(name, dtype, [arg.data for arg in args])
            if folded is not None:
                return self.const(folded, dtype)
        simpler = self._simplify(name, args, dtype)
        if simpler is not None:
            return simpler
        atoms = frozenset().union(*(arg.atoms for arg in args))
        return self._make("op", name, args, None, None, dtype, atoms)

    def invert(self, expr: Expr) -> Expr:
        """Returns the negation of a boolean expression."""
        return self.op("not", (expr,), "i1")

    def _simplify(self, name, args, dtype) -> Expr | None:
        if name == "convert":
            return args[0] if args[0].dtype == dtype else None
        if name == "select":
            return self._simplify_select(*args)
        if name in ("and", "or") and dtype == "i1":
            return self._simplify_logic(name, *args)
        if name == "not" and dtype == "i1":
            return self._simplify_not(args[0])
        if name.startswith("compare."):
            return self._simplify_compare(name[8:], *args)
        if name == "maximum":
            for one, other in (args, args[::-1]):
                if is_float(dtype) and one.is_const(-np.inf):
                    return other
        if name in ("add", "subtract", "multiply", "divide"):
            left, right = args
            neutral = 0 if name in ("add", "subtract") else 1
            if right.is_const(neutral):
                return left
            if name in ("add", "multiply") and left.is_const(neutral):
                return right
            if name == "multiply" and is_float(dtype):
                # exact for finite factors, which patterns assume
                for one in args:
                    if one.is_const(0):
                        return one
        return None

    def _simplify_select(self, predicate, on_true, on_false) -> Expr | None:
        if on_true is on_false or predicate.is_const(True):
            return on_true
        if predicate.is_const(False):
            return on_false
        if on_true.dtype == "i1":
            if on_true.is_const(True) and on_false.is_const(False):
                return predicate
            if on_true.is_const(False) and on_false.is_const(True):
                return self.invert(predicate)
            if on_false.is_const(False):
                return self.op("and", (predicate, on_true), "i1")
            if on_true.is_const(True):
                return self.op("or", (predicate, on_false), "i1")
        if predicate.kind == "op" and predicate.name == "not":
            return self.op(
                "select", (predicate.args[0], on_false, on_true), on_true.dtype
            )
        return None

    def _simplify_logic(self, name, left, right) -> Expr | None:
        neutral = name == "and"
        for one, other in ((left, right), (right, left)):
            if one.is_const(neutral):
                return other
            if one.is_const(not neutral):
                return one
        return left if left is right else None

    def _simplify_not(self, arg) -> Expr | None:
        if arg.kind == "op" and arg.name == "not":
            return arg.args[0]
        if arg.kind == "op" and arg.name.startswith("compare."):
            # the negation of a float comparison is not its inverse (NaN)
            if not is_float(arg.args[0].dtype):
                return self.op(f"compare.{_INVERSE[arg.name[8:]]}", arg.args, "i1")
        return None

    def _simplify_compare(self, direction, left, right) -> Expr | None:
        """Undoes `convert(mask) != 0` and the like."""
        if direction not in ("EQ", "NE"):
            return None
        for one, other in ((left, right), (right, left)):
            if other.kind != "const":
                continue
            boolean = one
            if one.kind == "op" and one.name == "convert":
                boolean = one.args[0]
            if boolean.dtype == "i1" and other.data in (0, 1):
                keep = bool(other.data) == (direction == "EQ")
                return boolean if keep else self.invert(boolean)
        return None

    def substitute(self, expr: Expr, old: Expr, new: Expr) -> Expr:
        """Returns `expr` with every occurrence of `old` replaced by `new`."""
        memo: dict[int, Expr] = {id(old): new}

        def visit(node: Expr) -> Expr:
            found = memo.get(id(node))
            if found is None:
                args = tuple(visit(arg) for arg in node.args)
                same = all(a is b for a, b in zip(args, node.args, strict=True))
                found = node if same else self.op(node.name, args, node.dtype)
                memo[id(node)] = found
            return found

        return visit(expr)
