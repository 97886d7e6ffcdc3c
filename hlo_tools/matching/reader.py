"""Reads StableHLO values as scalar expressions over an index space."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools.matching.expressions import NUMPY_TYPES, Builder, Expr, is_float
from hlo_tools.matching.index_space import (
    IncompatibleReshapeError,
    Index,
    IndexSpace,
    atoms_of,
    regroup,
)

# Operations that compute each element of the result from the same element of
# every operand.
ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "abs add and atan2 cbrt ceil compare convert cosine divide exponential "
        "exponential_minus_one floor is_finite log log_plus_one logistic maximum "
        "minimum multiply negate not or power remainder round_nearest_afz "
        "round_nearest_even rsqrt select sign sine sqrt subtract tan tanh xor clamp"
    ).split()
)
# Operations that only rearrange elements; an annotation is one that does nothing.
ANNOTATIONS = frozenset({"sdy.sharding_constraint"})
SHAPE_OPS = ANNOTATIONS | {
    "stablehlo.transpose",
    "stablehlo.reshape",
    "stablehlo.broadcast_in_dim",
}
# Read through even where a match asked to stop.
_TRANSPARENT = SHAPE_OPS | {"stablehlo.reduce", "stablehlo.constant"}
_MAX_NODES = 4000


def shape_of(value) -> tuple[int, ...]:
    """Returns the static shape of a ranked tensor value."""
    return tuple(ir.RankedTensorType(value.type).shape)


def dtype_of(value) -> str:
    """Returns the MLIR element type name of a tensor value."""
    return str(ir.RankedTensorType(value.type).element_type)


def result_number(value: Any) -> int:
    """Returns which result of its operation a value is."""
    return ir.OpResult(value).result_number


def is_static(value) -> bool:
    """Returns whether a value is a ranked tensor without dynamic dimensions."""
    if not isinstance(value.type, ir.RankedTensorType):
        return False
    return ir.RankedTensorType(value.type).has_static_shape


def defining_op(value):
    """Returns the operation that makes `value`, or None for a block argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner


def int_array(attribute) -> tuple[int, ...]:
    """Returns a dense array or elements attribute as a tuple of ints."""
    return tuple(int(x) for x in attribute)


def reducer_of(op) -> str | None:
    """Returns "add", "maximum", ... if a reduce has one operand and that body."""
    if len(op.operands) != 2:
        return None
    body = list(op.regions[0].blocks[0].operations)
    arguments = list(op.regions[0].blocks[0].arguments)
    if len(body) != 2 or len(body[0].operands) != 2:
        return None
    if {hash(v) for v in body[0].operands} != {hash(v) for v in arguments}:
        return None
    if body[1].operands[0] != body[0].results[0]:
        return None
    return body[0].operation.name.removeprefix("stablehlo.")


def is_plain_sum(op) -> bool:
    """Returns whether a reduce adds up elements, from zero."""
    if reducer_of(op) != "add":
        return False
    init = defining_op(loop_invariant(op.operands[1]))
    if init is None or init.operation.name != "stablehlo.constant":
        return False
    attr = init.attributes["value"]
    return bool(attr.is_splat and float(splat_value(attr)) == 0.0)


_NEUTRAL = {"add": 0, "maximum": -np.inf}


def loop_invariant(value):
    """Follows loop-carried block arguments that no iteration changes.

    Returns the value that a block argument of a `while` had before the loop, if
    the body hands it on unchanged; else `value` itself.
    """
    while isinstance(value.owner, ir.Block):
        parent = value.owner.owner
        if parent is None or parent.operation.name != "stablehlo.while":
            return value
        number = ir.BlockArgument(value).arg_number
        body = parent.operation.regions[1].blocks[0]
        handed_on = list(body.operations)[-1].operands[number]
        if handed_on != body.arguments[number]:
            return value
        value = parent.operation.operands[number]
    return value


class Reader:
    """Reads values of one function at given indices, with memory.

    Args:
      space: the index space; reshapes may ask for splits of its atoms.
      builder: makes the expressions.
      stop: called with (value, index); True makes the value a leaf.
    """

    def __init__(
        self,
        space: IndexSpace,
        builder: Builder,
        stop: Callable[[Any, Index], bool] = lambda value, index: False,
    ):
        self.space, self.builder, self.stop = space, builder, stop
        self._memo: dict[Any, Expr] = {}
        self.expanded: set[Any] = set()  # values whose operation was looked into
        # once set, values are followed through barriers and saved stacks ...
        self.origin: Callable[[Any], Any] | None = None
        # ... and arrays are known by the name that the site has for them
        self.aliases: dict[Any, Expr] = {}

    def read(self, value, index: Index) -> Expr:
        """Returns the expression of `value` at `index`.

        Raises:
          SplitAtomError: a reshape needs finer atoms; split and read again.
        """
        value = loop_invariant(value)
        key = (value, index)
        found = self._memo.get(key)
        if found is None:
            source = value if self.origin is None else self.origin(value)
            if source != value:
                found = self.read(source, index)
            elif not self._is_leaf(value, index):
                found = self.expand(value, index)
            if found is None:
                found = self.aliases.get(key)
            if found is None:
                found = self.builder.read("leaf", value, index, dtype_of(value))
            self._memo[key] = found
        return found

    def remember(self, value, index: Index, expr: Expr) -> None:
        """Takes `value` at `index` for `expr` from now on."""
        self._memo[(value, index)] = expr

    def value_of(self, expr: Expr) -> Any:
        """Returns the first value that was read as an expression, or None.

        Only values without a dimension that they do not vary along count.
        """
        for (value, index), found in self._memo.items():
            if found is expr and atoms_of(index) == expr.atoms:
                return value if dtype_of(value) == expr.dtype else None
        return None

    def _is_leaf(self, value, index: Index) -> bool:
        op = defining_op(value)
        if op is None or len(self._memo) > _MAX_NODES:
            return True
        if op.operation.name in _TRANSPARENT:
            return False  # so that a leaf never hides behind a mere reshape
        return self.stop(value, index)

    def expand(self, value, index: Index) -> Expr | None:
        """Reads one operation deep, whatever `stop` says; None if opaque."""
        op = defining_op(value)
        if op is None or not is_static(value) or dtype_of(value) not in NUMPY_TYPES:
            return None
        found = self._expand(op, value, index)
        if found is not None:
            self.expanded.add(value)
        return found

    def _expand(self, op, value, index: Index) -> Expr | None:
        name = op.operation.name
        if name in ELEMENTWISE:
            return self._elementwise(op, index, dtype_of(value))
        if name in SHAPE_OPS:
            try:
                inner = operand_index(op, index)
            except IncompatibleReshapeError:
                return None
            return self.read(op.operands[0], inner)
        if name == "stablehlo.constant":
            return self._constant(op, value, index)
        if name == "stablehlo.iota":
            dim = index[ir.IntegerAttr(op.attributes["iota_dimension"]).value]
            return self.builder.iota(dim, dtype_of(value))
        if name == "stablehlo.dot_general":
            return self.builder.read("dot", value, index, dtype_of(value))
        if name == "stablehlo.reduce":
            return self._reduce(op, value, index)
        return None

    def _elementwise(self, op, index: Index, dtype: str) -> Expr | None:
        name = op.operation.name.removeprefix("stablehlo.")
        if any(not is_static(operand) for operand in op.operands):
            return None
        if name == "compare":
            attr = stablehlo.ComparisonDirectionAttr(
                op.attributes["comparison_direction"]
            )
            name = f"compare.{attr.value}"
            kind = (
                op.attributes["compare_type"] if "compare_type" in op.attributes else ""
            )
            if "TOTALORDER" in str(kind):
                return None
        args = []
        for operand in op.operands:
            # the predicate of select and the bounds of clamp may be scalars
            scalar = not shape_of(operand)
            args.append(self.read(operand, () if scalar else index))
        return self.builder.op(name, tuple(args), dtype)

    def _constant(self, op, value, index: Index) -> Expr | None:
        attr = op.attributes["value"]
        if not isinstance(attr, ir.DenseElementsAttr):
            return None
        dtype = dtype_of(value)
        if attr.is_splat:
            return self.builder.const(splat_value(attr), dtype)
        varying = [dim for dim in index if dim]
        if len(varying) == 1 and not is_float(dtype) and dtype != "i1":
            return self._progression(np.asarray(attr).reshape(-1), varying[0], dtype)
        return None

    def _progression(self, numbers: np.ndarray, dim, dtype: str) -> Expr | None:
        """Reads an arithmetic progression (numpy's arange) as an iota."""
        first, step = int(numbers[0]), int(numbers[1]) - int(numbers[0])
        wanted = first + step * np.arange(numbers.size, dtype=np.int64)
        if not np.array_equal(numbers, wanted):
            return None
        scaled = self.builder.op(
            "multiply",
            (self.builder.iota(dim, dtype), self.builder.const(step, dtype)),
            dtype,
        )
        return self.builder.op("add", (scaled, self.builder.const(first, dtype)), dtype)

    def _reduce(self, op, value, index: Index) -> Expr | None:
        reducer = reducer_of(op)
        if reducer not in _NEUTRAL:
            return None
        init = self.read(op.operands[1], ())
        if not init.is_const(_NEUTRAL[reducer]):
            return None
        dims = int_array(op.attributes["dimensions"])
        rest = iter(index)
        rank = len(shape_of(op.operands[0]))
        inner = tuple(() if i in dims else next(rest) for i in range(rank))
        operand = loop_invariant(op.operands[0])
        return self.builder.reduce(
            reducer, operand, inner, dims, (value, index), dtype_of(value)
        )


def table_of(value) -> np.ndarray | None:
    """Returns the elements of a constant value, or None if it is none."""
    op = defining_op(value)
    if op is None or op.operation.name != "stablehlo.constant":
        return None
    attr = op.attributes["value"]
    if not isinstance(attr, ir.DenseElementsAttr):
        return None
    if attr.is_splat:
        return np.full(shape_of(value), splat_value(attr))
    if dtype_of(value) == "bf16":
        return _bfloat16_table(str(attr)).reshape(shape_of(value))
    return np.asarray(attr).reshape(shape_of(value))


def _bfloat16_table(text: str) -> np.ndarray:
    """Reads the elements of a dense bfloat16 attribute, which numpy can not."""
    dtype = NUMPY_TYPES["bf16"]
    body = text[text.index("<") + 1 : text.rindex("> : ")]
    if body.startswith('"0x'):
        return np.frombuffer(bytes.fromhex(body.strip('"')[2:]), dtype)
    numbers = re.findall(r"[-+.\w]+", body)
    bits = [np.uint16(int(n, 16)).view(dtype) if "0x" in n else None for n in numbers]
    return np.asarray(
        [dtype(n) if b is None else b for n, b in zip(numbers, bits, strict=True)]
    )


def splat_value(attr):
    """Returns the one value of a splat DenseElementsAttr as a numpy scalar."""
    element = str(ir.ShapedType(attr.type).element_type)
    scalar = attr.get_splat_value()
    if element == "i1":
        return np.bool_(ir.BoolAttr(scalar).value)
    if isinstance(scalar, ir.FloatAttr):
        return NUMPY_TYPES[element](scalar.value)
    # unsigned and signed integers: through the raw bits
    return NUMPY_TYPES[element](np.asarray(attr).reshape(-1)[0])


def int_of(value) -> int | None:
    """Returns the integer that a scalar value always is, or None."""
    op = defining_op(loop_invariant(value))
    if op is not None and op.operation.name == "stablehlo.convert":
        op = defining_op(loop_invariant(op.operands[0]))
    if op is None or op.operation.name != "stablehlo.constant":
        return None
    attr = op.attributes["value"]
    if not isinstance(attr, ir.DenseElementsAttr) or not attr.is_splat:
        return None
    return int(splat_value(attr))


def operand_index(op, index: Index) -> Index:
    """Returns the index of a shape operation's operand, given its result's.

    Raises:
      SplitAtomError, IncompatibleReshapeError: as `regroup`.
    """
    name = op.operation.name
    operand = op.operands[0]
    if name in ANNOTATIONS:
        return index
    if name == "stablehlo.transpose":
        permutation = int_array(op.attributes["permutation"])
        inner: list = [()] * len(index)
        for result_dim, operand_dim in enumerate(permutation):
            inner[operand_dim] = index[result_dim]
        return tuple(inner)
    if name == "stablehlo.reshape":
        return regroup(index, shape_of(operand))
    dims = int_array(op.attributes["broadcast_dimensions"])
    return tuple(
        () if size == 1 else index[dim]
        for size, dim in zip(shape_of(operand), dims, strict=True)
    )


def result_index(op, index: Index) -> Index | None:
    """Returns the index of an operation's result, given its operand's.

    None if the operation does more than convert or rearrange one array.

    Raises:
      SplitAtomError: as `regroup`.
    """
    if op.name in ANNOTATIONS or op.name == "stablehlo.convert":
        return index
    if op.name == "stablehlo.transpose":
        return tuple(index[dim] for dim in int_array(op.attributes["permutation"]))
    if op.name == "stablehlo.reshape":
        try:
            return regroup(index, shape_of(op.results[0]))
        except IncompatibleReshapeError:
            return None
    return None
