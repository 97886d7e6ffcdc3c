"""Rewriting MLIR modules by patterns: a greedy driver, readers and builders.

A pattern is a function from an operation to one of three answers: a `Match` (what
to replace and how to build the new values), a reason (a sentence: the operation is
of the right kind, but may not be rewritten) or None (not this pattern's business).
The driver is plain Python on JAX's public MLIR bindings. It visits a module once,
and then only operations near a change.

Length: patterns need the driver, the readers and the builders together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo


@dataclass(frozen=True)
class Match:
    """A rewrite that may be made.

    Attributes:
      op: the operation whose results are replaced. It may be another one than the
        pattern was asked about, such as a user of it.
      build: makes the value that replaces each result; called at most once, with
        new operations going in front of `op`.
    """

    op: ir.Operation
    build: Callable[[Rewriter], ir.Value | Sequence[ir.Value]]


type RewritePattern = Callable[[ir.Operation], Match | str | None]
# Operation name -> the patterns that look at such operations, first match wins.
# Operations without results have no patterns.
type PatternTable = Mapping[str, Sequence[RewritePattern]]


class RewriteLimitError(RuntimeError):
    """Patterns undo each other: a bug in them, found by counting rewrites."""


# ------------------------------------------------------------- kinds of operations

_CHLO_ELEMENTWISE = (
    "acos acosh asin asinh atan atanh bessel_i1e conj cosh digamma erf erf_inv erfc "
    "is_inf is_neg_inf is_pos_inf lgamma next_after polygamma sinh square tan zeta"
)
_STABLEHLO_ELEMENTWISE = (
    "abs add and atan2 cbrt ceil clamp compare complex convert cosine "
    "count_leading_zeros divide exponential exponential_minus_one floor imag "
    "is_finite log log_plus_one logistic maximum minimum multiply negate not or "
    "popcnt power real reduce_precision remainder round_nearest_afz "
    "round_nearest_even rsqrt select shift_left shift_right_arithmetic "
    "shift_right_logical sign sine sqrt subtract tan tanh xor"
)
# Each element of the result is computed from the same element of every operand; the
# predicate of a select and the bounds of a clamp may be scalars.
ELEMENTWISE = frozenset(
    [f"stablehlo.{name}" for name in _STABLEHLO_ELEMENTWISE.split()]
    + [f"chlo.{name}" for name in _CHLO_ELEMENTWISE.split()]
)
_ELEMENTWISE_ATTRIBUTES = frozenset(
    "comparison_direction compare_type exponent_bits mantissa_bits "
    "result_accuracy".split()
)
_ATTRIBUTES = {
    "stablehlo.broadcast_in_dim": frozenset({"broadcast_dimensions"}),
    "stablehlo.concatenate": frozenset({"dimension"}),
    "stablehlo.constant": frozenset({"value"}),
    "stablehlo.dot_general": frozenset(
        {"dot_dimension_numbers", "precision_config", "algorithm"}
    ),
    "stablehlo.dynamic_broadcast_in_dim": frozenset(
        {
            "broadcast_dimensions",
            "known_expanding_dimensions",
            "known_nonexpanding_dimensions",
        }
    ),
    "stablehlo.dynamic_gather": frozenset({"dimension_numbers", "indices_are_sorted"}),
    "stablehlo.dynamic_iota": frozenset({"iota_dimension"}),
    "stablehlo.dynamic_pad": frozenset(),
    "stablehlo.dynamic_reshape": frozenset(),
    "stablehlo.dynamic_slice": frozenset({"slice_sizes"}),
    "stablehlo.dynamic_update_slice": frozenset(),
    "stablehlo.gather": frozenset(
        {"dimension_numbers", "slice_sizes", "indices_are_sorted"}
    ),
    "stablehlo.get_dimension_size": frozenset({"dimension"}),
    "stablehlo.get_tuple_element": frozenset({"index"}),
    "stablehlo.iota": frozenset({"iota_dimension"}),
    "stablehlo.pad": frozenset(
        {"edge_padding_low", "edge_padding_high", "interior_padding"}
    ),
    "stablehlo.real_dynamic_slice": frozenset(),
    "stablehlo.reduce": frozenset({"dimensions"}),
    "stablehlo.reshape": frozenset(),
    "stablehlo.reverse": frozenset({"dimensions"}),
    "stablehlo.set_dimension_size": frozenset({"dimension"}),
    "stablehlo.slice": frozenset({"start_indices", "limit_indices", "strides"}),
    "stablehlo.transpose": frozenset({"permutation"}),
    "stablehlo.tuple": frozenset(),
}
# How many attributes an operation has at least (0 if not listed): with no more than
# these it has no others, and their names, which are slow to get, tell nothing.
REQUIRED_ATTRIBUTES = {
    "stablehlo.broadcast_in_dim": 1,
    "stablehlo.compare": 1,
    "stablehlo.concatenate": 1,
    "stablehlo.constant": 1,
    "stablehlo.dot_general": 1,
    "stablehlo.iota": 1,
    "stablehlo.reduce": 1,
    "stablehlo.slice": 3,
    "stablehlo.transpose": 1,
}
# Operations without effects of their own or of their regions: erased when nobody uses
# them.
_ERASABLE = ELEMENTWISE | _ATTRIBUTES.keys()


def is_plain(op: ir.Operation) -> bool:
    """Returns whether the attributes of `op` are only those that define its value.

    Anything else (shardings, `mhlo.frontend_attributes`, attributes that we do not
    know) would be lost if the operation was replaced or moved.
    """
    name, attributes = op.name, op.attributes
    if len(attributes) <= REQUIRED_ATTRIBUTES.get(name, 0):
        return True
    known = _ATTRIBUTES.get(name, _ELEMENTWISE_ATTRIBUTES)
    return known.issuperset(attributes.keys())


# How the functions of bound kernels, and of composites, are named.
KERNEL_PREFIX = "hlo_tools."


def is_kernel(op: ir.Operation) -> bool:
    """Returns whether an operation is the function of a bound kernel."""
    if op.name != "func.func":
        return False
    return ir.StringAttr(op.attributes["sym_name"]).value.startswith(KERNEL_PREFIX)


def walk(root: ir.Operation, names: Iterable[str] | None = None) -> list[ir.Operation]:
    """Returns the operations in all regions of `root`, outermost and first ones first.

    Kernels stay as they were lowered, so what is in their functions is left out.

    Args:
      root: usually the module's operation.
      names: if given, only operations of these names.
    """
    found: list[ir.Operation] = []
    wanted = None if names is None else frozenset(names)

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "func.func" and is_kernel(op):
            return ir.WalkResult.SKIP
        if wanted is None or op.name in wanted:
            found.append(op)
        return ir.WalkResult.ADVANCE

    root.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


# ------------------------------------------------------------------------- readers


def producer(value: ir.Value, name: str | None = None) -> ir.Operation | None:
    """Returns the operation that makes `value` (if it is called `name`), else None."""
    if not isinstance(value, ir.OpResult):
        return None
    op = value.owner.operation
    return op if name is None or op.name == name else None


def users(value: ir.Value) -> list[ir.Operation]:
    """Returns the operations that use `value`, one entry a use."""
    return [use.owner.operation for use in value.uses]


def single_user(value: ir.Value) -> ir.Operation | None:
    """Returns the operation that all uses of `value` belong to, if there is one."""
    uses = iter(value.uses)
    first = next(uses, None)
    if first is None:
        return None
    op = first.owner.operation
    return op if all(use.owner.operation == op for use in uses) else None


def shape_of(value: ir.Value) -> tuple[int, ...] | None:
    """Returns the shape of a static tensor of plain numbers, else None.

    None stands for what the passes leave alone: dynamic or bounded dimensions,
    quantized elements, tokens and tuples.
    """
    kind = value.type
    if not isinstance(kind, ir.RankedTensorType) or kind.encoding is not None:
        return None
    numbers = (ir.FloatType, ir.IntegerType, ir.ComplexType)
    if not kind.has_static_shape or not isinstance(kind.element_type, numbers):
        return None
    return tuple(kind.shape)


def element_type(value: ir.Value) -> ir.Type:
    """Returns the element type of a tensor value."""
    return value.type.element_type


def is_mask(value: ir.Value) -> bool:
    """Returns whether `value` is a static tensor of booleans."""
    if shape_of(value) is None:
        return False
    kind = element_type(value)
    return isinstance(kind, ir.IntegerType) and kind.width == 1


def int_list(op: ir.Operation, attribute: str) -> tuple[int, ...]:
    """Returns an attribute that is an array of integers."""
    return tuple(ir.DenseI64ArrayAttr(op.attributes[attribute]))


def splat_attribute(value: ir.Value) -> ir.Attribute | None:
    """Returns the one element of a constant, seen through shape operations.

    None if `value` is no constant, if its elements differ, or if they are complex
    (the bindings can not read those).
    """
    op = producer(value)
    while op is not None and op.name in _SHAPE_ONLY and is_plain(op):
        op = producer(op.operands[0])
    if op is None or op.name != "stablehlo.constant" or not is_plain(op):
        return None
    kind = op.results[0].type
    if kind.encoding is not None or isinstance(kind.element_type, ir.ComplexType):
        return None
    attribute = op.attributes["value"]
    if not isinstance(attribute, ir.DenseElementsAttr) or not attribute.is_splat:
        return None
    return attribute.get_splat_value()


_SHAPE_ONLY = frozenset(
    {"stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.transpose"}
)


def splat_number(value: ir.Value) -> bool | int | float | None:
    """Returns the element of a splat constant as a Python number, exactly."""
    attribute = splat_attribute(value)
    return None if attribute is None else attribute.value


def splat_value(value: ir.Value) -> np.ndarray | None:
    """Returns the element of a splat constant as a NumPy scalar of its own type."""
    number = splat_number(value)
    if number is None:
        return None
    return np.asarray(number, numpy_dtype(element_type(value)))


_FLOAT_NAMES = {"f16": "float16", "f32": "float32", "f64": "float64"}


def numpy_dtype(kind: ir.Type) -> np.dtype:
    """Returns the NumPy type of an element type (of ml_dtypes if NumPy has none).

    Raises:
      TypeError: there is none.
    """
    return _numpy_dtype(str(kind))


@functools.cache
def _numpy_dtype(text: str) -> np.dtype:
    if text in ("i1", "bf16"):
        name = {"i1": "bool", "bf16": "bfloat16"}[text]
    elif text.startswith(("i", "ui")):
        name = text.replace("i", "int", 1)
    else:  # f8E4M3FN is float8_e4m3fn
        name = _FLOAT_NAMES.get(text, "float" + text[1:].lower().replace("e", "_e", 1))
    return np.dtype(getattr(ml_dtypes, name, name))


# ------------------------------------------------------------------------ builders


def tensor_type(shape: Sequence[int], element: ir.Type) -> ir.RankedTensorType:
    """Returns the type of a tensor (within `rewrite`, or another location's scope)."""
    return ir.RankedTensorType.get(list(shape), element)


def number_attribute(number: bool | int | float, element: ir.Type) -> ir.Attribute:
    """Returns a number as an attribute of an element type."""
    if isinstance(element, ir.IntegerType):
        return ir.IntegerAttr.get(element, int(number))
    return ir.FloatAttr.get(element, float(number))


class Rewriter:
    """Makes operations in front of the one that is being replaced.

    New operations get the location of the one they stand for.

    Attributes:
      created: the operations made for the current match.
    """

    def __init__(self, anchor: ir.Operation):
        self.created: list[ir.Operation] = []
        self.move_to(anchor)

    def move_to(self, anchor: ir.Operation) -> None:
        """Puts what is made from now on in front of `anchor`."""
        self._anchor = anchor
        self._location = anchor.location
        self._point = ir.InsertionPoint(anchor)
        self.created = []

    def create(
        self,
        name: str,
        operands: Sequence[ir.Value],
        result_type: ir.Type,
        attributes: Mapping[str, Any] | None = None,
        location: ir.Location | None = None,
    ) -> ir.Value:
        """Makes an operation with one result, and returns the result."""
        op = ir.Operation.create(
            name,
            results=[result_type],
            operands=list(operands),
            attributes=dict(attributes or {}),
            loc=location or self._location,
            ip=self._point,
        )
        self.created.append(op)
        return op.results[0]

    def with_operands(
        self,
        op: ir.Operation,
        operands: Sequence[ir.Value],
        shape: Sequence[int],
        changed: Mapping[str, ir.Attribute] | None = None,
    ) -> ir.Value:
        """Makes `op` once more: other operands, shape, and `changed` attributes."""
        kind = tensor_type(shape, element_type(op.results[0]))
        attributes = {name: op.attributes[name] for name in op.attributes.keys()}
        attributes.update(changed or {})
        return self.create(op.name, operands, kind, attributes, op.location)

    def splat(self, number: Any, shape: Sequence[int], element: ir.Type) -> ir.Value:
        """Makes a constant; `number` is a Python number or an attribute."""
        if not isinstance(number, ir.Attribute):
            number = number_attribute(number, element)
        kind = tensor_type(shape, element)
        value = ir.DenseElementsAttr.get_splat(kind, number)
        return self.create("stablehlo.constant", [], kind, {"value": value})

    def transpose(self, value: ir.Value, permutation: Sequence[int]) -> ir.Value:
        shape = value.type.shape
        kind = tensor_type([shape[d] for d in permutation], element_type(value))
        attribute = ir.DenseI64ArrayAttr.get(list(permutation))
        return self.create(
            "stablehlo.transpose", [value], kind, {"permutation": attribute}
        )

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        kind = tensor_type(shape, element_type(value))
        return self.create("stablehlo.reshape", [value], kind)

    def broadcast(
        self, value: ir.Value, shape: Sequence[int], dims: Sequence[int]
    ) -> ir.Value:
        kind = tensor_type(shape, element_type(value))
        attribute = ir.DenseI64ArrayAttr.get(list(dims))
        return self.create(
            "stablehlo.broadcast_in_dim",
            [value],
            kind,
            {"broadcast_dimensions": attribute},
        )

    def iota(self, shape: Sequence[int], element: ir.Type, dim: int) -> ir.Value:
        i64 = ir.IntegerType.get_signless(64)
        return self.create(
            "stablehlo.iota",
            [],
            tensor_type(shape, element),
            {"iota_dimension": ir.IntegerAttr.get(i64, dim)},
        )

    def compare(
        self, direction: str, left: ir.Value, right: ir.Value, compare_type: Any
    ) -> ir.Value:
        """Makes a comparison; `compare_type` is the attribute of the old one."""
        attributes = {
            "comparison_direction": stablehlo.ComparisonDirectionAttr.get(direction)
        }
        if compare_type is not None:
            attributes["compare_type"] = compare_type
        kind = tensor_type(left.type.shape, ir.IntegerType.get_signless(1))
        return self.create("stablehlo.compare", [left, right], kind, attributes)


# -------------------------------------------------------------------------- driver


class _Driver:
    """One run of `rewrite`: the operations still to look at, and the count."""

    def __init__(
        self,
        root: ir.Operation,
        patterns: PatternTable,
        on_reason: Callable[[ir.Operation, str], None] | None,
    ):
        self.patterns, self.on_reason = patterns, on_reason
        # A dict used as a stack. An erased operation leaves it at once, so no handle
        # to freed memory is ever taken from it. The keys are results, because the
        # hash of an operation changes with its operands.
        found = walk(root, patterns)
        self.pending = {op.results[0]: op for op in reversed(found)}
        self.limit = 1000 + 20 * len(found)
        self.count = 0
        self.rewriter: Rewriter | None = None

    def run(self) -> int:
        while self.pending:
            _, op = self.pending.popitem()
            for pattern in self.patterns[op.name]:
                found = pattern(op)
                if isinstance(found, Match):
                    if found.op != op:  # may match again, for another user
                        self.enqueue([op])
                    self.apply(found)
                    break
                if found is not None and self.on_reason is not None:
                    self.on_reason(op, found)
        return self.count

    def apply(self, match: Match) -> None:
        self.count += 1
        if self.count > self.limit:
            raise RewriteLimitError(
                f"over {self.limit} rewrites; the last one was of {match.op.name}"
            )
        op = match.op
        if self.rewriter is None:
            self.rewriter = Rewriter(op)
        else:
            self.rewriter.move_to(op)
        built = match.build(self.rewriter)
        values = [built] if isinstance(built, ir.Value) else list(built)
        for old, new in zip(op.results, values, strict=True):
            if old.type != new.type:
                raise TypeError(f"{op.name}: {old.type} replaced by {new.type}")
            self.enqueue(users(old))
            old.replace_all_uses_with(new)
        created = self.rewriter.created
        self.enqueue(created)
        # One new operation is what replaces the old; of several, some may be unused.
        self.erase_dead([op, *created] if len(created) > 1 else [op])

    def enqueue(self, ops: Iterable[ir.Operation]) -> None:
        for op in ops:
            if op.name in self.patterns:
                self.pending[op.results[0]] = op

    def erase_dead(self, ops: Iterable[ir.Operation]) -> None:
        """Erases those of `ops` that nobody uses, and then their operands' ops."""
        todo = {op.results[0]: op for op in ops}
        while todo:
            _, op = todo.popitem()
            if op.name not in _ERASABLE or _is_used(op):
                continue
            operands = list(op.operands)
            self._forget(op)
            op.erase()
            for value in operands:
                # One use fewer: the last user may match now.
                last = single_user(value)
                if last is not None:
                    self.enqueue([last])
                elif (made_by := producer(value)) is not None:
                    todo[value] = made_by

    def _forget(self, op: ir.Operation) -> None:
        """Looks at an operation, and at what is in it, no more."""
        gone = [op] if not len(op.regions) else walk(op)
        for one in gone:
            if len(one.results):
                self.pending.pop(one.results[0], None)


def _is_used(op: ir.Operation) -> bool:
    return any(next(iter(result.uses), None) is not None for result in op.results)


def rewrite(
    root: ir.Operation,
    patterns: PatternTable,
    on_reason: Callable[[ir.Operation, str], None] | None = None,
) -> int:
    """Applies patterns below `root` until none matches.

    Args:
      root: changed in place; usually the module's operation.
      patterns: operation name -> patterns.
      on_reason: told (operation, reason) of each pattern that declined.

    Returns:
      The number of rewrites; 0 means that nothing changed.

    Raises:
      RewriteLimitError: the patterns do not come to an end.
    """
    with root.context, ir.Location.unknown(root.context):
        return _Driver(root, patterns, on_reason).run()


def permuted(items: Sequence[Any], permutation: Sequence[int]) -> tuple[Any, ...]:
    """Returns `items` in the order that a transpose would put them."""
    return tuple(items[d] for d in permutation)


def inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    """Returns the permutation that undoes `permutation`."""
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))


def is_identity(permutation: Sequence[int]) -> bool:
    return tuple(permutation) == tuple(range(len(permutation)))
