"""fold-constants: evaluates operations whose operands are all constants.

What is exact on every device is always folded. A correctly rounded sum, product,
quotient, root or conversion is folded where "reassociating" rewrites are allowed,
functions that each device computes in its own way (exp, tanh, erf, ...) where
"approximate" ones are. Subnormal numbers, divisions of integers by zero, conversions
out of range and what would make a NaN or infinity of a function are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools.passes import constant_evaluation
from hlo_tools.passes.constant_values import (
    CONSTANT,
    dtype_of,
    is_splat,
    make_constant,
    read_constant,
)
from hlo_tools.rewriting import (
    ELEMENTWISE,
    Match,
    element_type,
    int_list,
    is_plain,
    rewrite,
    shape_of,
    users,
)

# As in StableHLO's own folder: 65,536 elements, splats exempt.
LIMIT = 65536
# kind of evaluation -> what must be allowed
_NEEDS = {"exact": "bitwise", "rounded": "reassociating", "approximate": "approximate"}


def _elementwise(op: ir.Operation, arrays: list[np.ndarray]) -> Any:
    name = op.name.partition(".")[2]
    if name == "compare":
        return _compare(op, arrays)
    if name == "convert":
        dtype = dtype_of(element_type(op.results[0]))
        return None if dtype is None else constant_evaluation.convert(arrays[0], dtype)
    if name == "select":
        return np.where(*arrays).astype(arrays[1].dtype), "exact"
    if name == "clamp":
        low, value, high = arrays
        raised = constant_evaluation.evaluate("maximum", [low, value])
        if raised is None:
            return None
        return constant_evaluation.evaluate("minimum", [raised[0], high])
    if name in ("real", "imag"):
        return np.ascontiguousarray(getattr(arrays[0], name)), "exact"
    if name == "complex":
        kind = np.result_type(arrays[0].dtype, np.complex64)
        return (arrays[0] + 1j * arrays[1]).astype(kind), "exact"
    return constant_evaluation.evaluate(name, arrays)


def _compare(op: ir.Operation, arrays: list[np.ndarray]) -> Any:
    direction = stablehlo.ComparisonDirectionAttr(op.attributes["comparison_direction"])
    kind = ""
    if "compare_type" in op.attributes:
        kind = stablehlo.ComparisonTypeAttr(op.attributes["compare_type"]).value
    return constant_evaluation.compare(direction.value, kind, arrays)


# --------------------------------------------------------------- placing elements


def _reshape(op: ir.Operation, arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0].reshape(op.results[0].type.shape)


def _transpose(op: ir.Operation, arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0].transpose(int_list(op, "permutation"))


def _broadcast(op: ir.Operation, arrays: list[np.ndarray]) -> np.ndarray | None:
    """Only a splat: copies of other constants would make the program larger."""
    shape = op.results[0].type.shape
    if not is_splat(arrays[0]) and math.prod(shape) != arrays[0].size:
        return None
    dims = int_list(op, "broadcast_dimensions")
    order = np.argsort(dims, kind="stable")
    placed = arrays[0].transpose(order)
    full = [1] * len(shape)
    for extent, dim in zip(placed.shape, sorted(dims), strict=True):
        full[dim] = extent
    return np.broadcast_to(placed.reshape(full), shape)


def _slice(op: ir.Operation, arrays: list[np.ndarray]) -> np.ndarray:
    names = ("start_indices", "limit_indices", "strides")
    rows = zip(*(int_list(op, name) for name in names), strict=True)
    return arrays[0][tuple(slice(*row) for row in rows)]


def _concatenate(op: ir.Operation, arrays: list[np.ndarray]) -> np.ndarray:
    joined = np.concatenate(arrays, axis=op.attributes["dimension"].value)
    if all(is_splat(x) for x in arrays):
        raw = [np.array(x.reshape(-1)[:1]).tobytes() for x in arrays]
        if len(set(raw)) == 1:  # the same bits: 0.0 is not -0.0
            return np.broadcast_to(arrays[0].reshape(-1)[0], joined.shape)
    return joined


def _reverse(op: ir.Operation, arrays: list[np.ndarray]) -> np.ndarray:
    return np.flip(arrays[0], int_list(op, "dimensions"))


def _pad(op: ir.Operation, arrays: list[np.ndarray]) -> np.ndarray | None:
    value, filler = arrays
    shape = op.results[0].type.shape
    low = int_list(op, "edge_padding_low")
    steps = int_list(op, "interior_padding")
    result = np.full(shape, filler)
    source, place = [], []
    for start, step, extent, whole in zip(low, steps, value.shape, shape, strict=True):
        positions = start + np.arange(extent) * (step + 1)
        kept = np.flatnonzero((positions >= 0) & (positions < whole))
        source.append(kept)
        place.append(positions[kept])
    result[np.ix_(*place)] = value[np.ix_(*source)]
    return result


_PLACING: dict[str, Callable[[ir.Operation, list[np.ndarray]], np.ndarray | None]] = {
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.pad": _pad,
    "stablehlo.reshape": _reshape,
    "stablehlo.reverse": _reverse,
    "stablehlo.slice": _slice,
    "stablehlo.transpose": _transpose,
}


# -------------------------------------------------------------------------- reduce

_REDUCERS = {
    "stablehlo.add": np.add, "stablehlo.multiply": np.multiply,
    "stablehlo.maximum": np.maximum, "stablehlo.minimum": np.minimum,
    "stablehlo.and": np.bitwise_and, "stablehlo.or": np.bitwise_or,
    "stablehlo.xor": np.bitwise_xor,
}  # fmt: skip


def _reduce(op: ir.Operation, arrays: list[np.ndarray]) -> np.ndarray | None:
    """Reduces integers and booleans, whose order does not matter."""
    if len(arrays) != 2 or arrays[0].dtype.kind not in "biu":
        return None
    body = [inner.operation for inner in op.regions[0].blocks[0].operations]
    arguments = list(op.regions[0].blocks[0].arguments)
    if len(body) != 2 or body[0].name not in _REDUCERS:
        return None
    if list(body[0].operands) not in (arguments, arguments[::-1]):
        return None
    if list(body[1].operands) != list(body[0].results):
        return None
    value, start = arrays
    function = _REDUCERS[body[0].name]
    axes = tuple(int_list(op, "dimensions"))
    with np.errstate(all="ignore"):
        options = {"dtype": value.dtype, "initial": start[()]}
        result = function.reduce(value, axis=axes, **options)
    return np.asarray(result, value.dtype)


# ------------------------------------------------------------------------- pattern


def _foldable(op: ir.Operation) -> bool:
    return (
        op.name in ELEMENTWISE or op.name in _PLACING or op.name == "stablehlo.reduce"
    )


def _operands(op: ir.Operation, limit: int) -> list[np.ndarray] | None:
    arrays = []
    for value in op.operands:
        array = read_constant(value, limit)
        if array is None:
            return None
        arrays.append(array)
    return arrays


def _evaluate(op: ir.Operation, arrays: list[np.ndarray]) -> Any:
    """Returns (array, kind), an array that only places elements, or None."""
    if op.name in _PLACING:
        return _PLACING[op.name](op, arrays)
    if op.name == "stablehlo.reduce":
        return _reduce(op, arrays)
    shape = tuple(op.results[0].type.shape)
    if all(is_splat(array) for array in arrays):
        ones = [np.array(array.reshape(-1)[:1]) for array in arrays]
        found = _elementwise(op, ones)
        return found and (np.broadcast_to(found[0].reshape(()), shape), found[1])
    whole = [np.broadcast_to(array, shape) for array in arrays]
    return _elementwise(op, [np.ascontiguousarray(array) for array in whole])


def _fold(op: ir.Operation, limit: int, allows: Callable[[str], bool]):
    if len(op.results) != 1 or shape_of(op.results[0]) is None:
        return None
    arrays = _operands(op, limit)
    if not arrays:
        return None
    if not is_plain(op):
        return "the operation has attributes that would be lost"
    kind = op.results[0].type
    # Large results stay what they are, unless they are splats of splats.
    if math.prod(kind.shape) > limit and not all(is_splat(x) for x in arrays):
        return f"over {limit} elements"
    if op.name in ("stablehlo.concatenate", "stablehlo.pad", "stablehlo.reduce"):
        if max([math.prod(kind.shape), *(x.size for x in arrays)]) > limit:
            return f"over {limit} elements"
    found = _evaluate(op, arrays)
    if found is None:
        return "not evaluated"
    result, how = found if isinstance(found, tuple) else (found, "exact")
    if not allows(_NEEDS[how]):
        return f"{how}, which is not allowed"
    if dtype_of(kind.element_type) != result.dtype:
        return "another element type"
    return Match(op, lambda rewriter: make_constant(rewriter, result, kind))


def fold_users(
    constant: ir.Operation, limit: int, allows: Callable[[str], bool]
) -> Match | str | None:
    """Evaluates the first user of a constant that only has constants.

    Looks from constants down, as few operations have nothing but constants above.
    """
    reason = None
    for user in users(constant.results[0]):
        if not _foldable(user) or next(iter(_uses(user)), None) is None:
            continue
        found = _fold(user, limit, allows)
        if isinstance(found, Match):
            return found
        reason = found or reason
    return reason


def _uses(op: ir.Operation):
    return (use for result in op.results for use in result.uses)


@dataclass(frozen=True)
class FoldConstants:
    """Evaluates operations on constants.

    Options:
      limit: the most elements of a constant; those that are all the same are exempt.
    """

    name: ClassVar[str] = "fold-constants"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = (
        "evaluate operations on constants; what rounds only where that is allowed"
    )
    stands_alone: ClassVar[bool] = True

    limit: int = LIMIT

    def run(self, module: Any, context: Any) -> bool:
        """Rewrites `module` in place; returns whether anything changed."""
        pattern = partial(fold_users, limit=self.limit, allows=context.allows)
        return rewrite(module.module.operation, {CONSTANT: (pattern,)}) > 0
