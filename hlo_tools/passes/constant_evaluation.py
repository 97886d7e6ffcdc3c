"""What an elementwise operation makes of constants, and how surely.

Three kinds: `exact` (no rounding happened, nothing that hardware may flush, no NaN
made: every device gives these bits), `rounded` (correctly rounded, as IEEE 754 asks
of +, -, *, / and sqrt and of conversions) and `approximate` (functions such as exp,
that each device computes in its own way).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

KINDS = ("exact", "rounded", "approximate")
type Evaluated = tuple[np.ndarray, str]


def is_float(dtype: np.dtype) -> bool:
    """Returns whether a type is a real float; the small ones have no NumPy kind."""
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


def _is_integer(dtype: np.dtype) -> bool:
    # int4 and smaller are left alone: their arithmetic is ml_dtypes' own
    return dtype.kind in "iu"


def has_subnormals(array: np.ndarray) -> bool:
    """Returns whether an array of floats has values that some hardware flushes."""
    if not is_float(array.dtype):
        return False
    wide = np.abs(array.astype(np.float64))
    smallest = float(ml_dtypes.finfo(array.dtype).smallest_normal)
    return bool(np.any((wide > 0) & (wide < smallest)))


def _nan_made(operands: Sequence[np.ndarray], result: np.ndarray) -> bool:
    """Returns whether a result has a NaN, whose bits differ between devices."""
    if not is_float(result.dtype):
        return False
    return bool(np.isnan(result.astype(np.float64)).any())


# ------------------------------------------------------------- integers and logic


def _divide_integers(left: np.ndarray, right: np.ndarray) -> np.ndarray | None:
    """Rounds toward zero; what divides by zero or overflows is left to the device."""
    if not right.all() or _overflows(left, right):
        return None
    quotient = np.abs(_wide(left)) // np.abs(_wide(right))
    return (quotient * _signs(left) * _signs(right)).astype(left.dtype)


def _remainder_integers(left: np.ndarray, right: np.ndarray) -> np.ndarray | None:
    if not right.all() or _overflows(left, right):
        return None
    return (np.abs(_wide(left)) % np.abs(_wide(right)) * _signs(left)).astype(
        left.dtype
    )


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(object) if array.dtype.itemsize == 8 else array.astype("i8")


def _signs(array: np.ndarray) -> np.ndarray:
    return np.where(array < 0, -1, 1)


def _overflows(left: np.ndarray, right: np.ndarray) -> bool:
    if left.dtype.kind == "u":
        return False
    return bool(np.any((left == np.iinfo(left.dtype).min) & (right == -1)))


def _shift(name: str) -> Callable[..., np.ndarray | None]:
    def shift(value: np.ndarray, by: np.ndarray) -> np.ndarray:
        """Shifts by a number of bits that may be all of them, or more, or negative."""
        bits = value.dtype.itemsize * 8
        unsigned = np.dtype(f"u{value.dtype.itemsize}")
        amount = by.view(unsigned)  # a negative amount is a huge one
        inside = np.minimum(amount, bits - 1)
        if name == "arithmetic":
            signed = value.view(np.dtype(f"i{value.dtype.itemsize}"))
            return (signed >> inside.astype(signed.dtype)).view(value.dtype)
        raw = value.view(unsigned)
        moved = raw << inside if name == "left" else raw >> inside
        return np.where(amount < bits, moved, 0).astype(unsigned).view(value.dtype)

    return shift


def _popcount(value: np.ndarray) -> np.ndarray:
    unsigned = value.view(np.dtype(f"u{value.dtype.itemsize}"))
    return np.bitwise_count(unsigned).astype(value.dtype)


def _leading_zeros(value: np.ndarray) -> np.ndarray:
    bits = value.dtype.itemsize * 8
    unsigned = value.view(np.dtype(f"u{value.dtype.itemsize}"))
    lengths = [bits - int(number).bit_length() for number in unsigned.reshape(-1)]
    return np.asarray(lengths).reshape(value.shape).astype(value.dtype)


_INTEGER: dict[str, Callable[..., np.ndarray | None]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply,
    "divide": _divide_integers, "remainder": _remainder_integers,
    "maximum": np.maximum, "minimum": np.minimum, "negate": np.negative,
    "abs": np.abs, "sign": np.sign, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.invert, "popcnt": _popcount,
    "count_leading_zeros": _leading_zeros, "shift_left": _shift("left"),
    "shift_right_logical": _shift("logical"),
    "shift_right_arithmetic": _shift("arithmetic"),
}  # fmt: skip
# On booleans, + is or and * is and.
_BOOLEAN: dict[str, Callable[..., np.ndarray]] = {
    "add": np.logical_or, "multiply": np.logical_and, "and": np.logical_and,
    "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not,
    "maximum": np.logical_or, "minimum": np.logical_and,
}  # fmt: skip


# ------------------------------------------------------------------------- floats


def _afz(value: np.ndarray) -> np.ndarray:
    """Rounds halves away from zero; 0.49999997 + 0.5 would round up by itself."""
    down = np.trunc(value)
    return np.copysign(down + np.copysign(np.abs(value - down) >= 0.5, value), value)


def _sign(value: np.ndarray) -> np.ndarray:
    return np.where(value == 0, value, np.sign(value))  # keeps the sign of zero


def _zeros_differ(operands: list[np.ndarray]) -> bool:
    """Returns whether -0.0 meets 0.0, which devices do not order alike."""
    left, right = operands
    signs = np.signbit(left) != np.signbit(right)
    return bool(np.any((left == 0) & (right == 0) & signs))


def _error_of_sum(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    total = left + right
    part = total - left
    return (left - (total - part)) + (right - part)


# Evaluated in float64, exact there; the narrow result is the same number.
_FLOAT_EXACT: dict[str, Callable[..., np.ndarray]] = {
    "negate": np.negative, "abs": np.abs, "floor": np.floor, "ceil": np.ceil,
    "round_nearest_even": np.rint, "round_nearest_afz": _afz, "sign": _sign,
    "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip
_FLOAT_ROUNDED: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply,
    "divide": np.divide, "sqrt": np.sqrt,
}  # fmt: skip


def _elements(function: Callable[[float], float]) -> Callable[..., np.ndarray]:
    return np.vectorize(function, otypes=[np.float64])


_FLOAT_APPROXIMATE: dict[str, Callable[..., np.ndarray]] = {
    "cosine": np.cos, "sine": np.sin, "tan": np.tan, "tanh": np.tanh,
    "exponential": np.exp, "exponential_minus_one": np.expm1, "log": np.log,
    "log_plus_one": np.log1p, "cbrt": np.cbrt, "power": np.power,
    "atan2": np.arctan2, "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "erf": _elements(math.erf),
    "erfc": _elements(math.erfc),
}  # fmt: skip


def _evaluate_floats(name: str, operands: list[np.ndarray]) -> Evaluated | None:
    dtype = operands[0].dtype
    wide = [x.astype(np.float64) for x in operands]
    if name in _FLOAT_EXACT:
        if len(wide) == 2 and _zeros_differ(wide):
            return None
        result = _FLOAT_EXACT[name](*wide).astype(dtype)
        moves = name in ("negate", "abs")  # only the sign bit: NaN stays NaN
        made = not moves and _nan_made(operands, result)
        return result, "rounded" if made else "exact"
    if name in _FLOAT_ROUNDED:
        return _rounded(name, operands, wide)
    if name not in _FLOAT_APPROXIMATE:
        return None
    result = _FLOAT_APPROXIMATE[name](*wide)
    # Poles and domain errors are best left where a debugger can see them.
    if not np.isfinite(result).all():
        return None
    return result.astype(dtype), "approximate"


def _rounded(
    name: str, operands: list[np.ndarray], wide: list[np.ndarray]
) -> Evaluated | None:
    function, dtype = _FLOAT_ROUNDED[name], operands[0].dtype
    if name == "sqrt" and (wide[0] < 0).any():
        return None
    # Rounding to float64 first does no harm to types of at most 24 bits.
    result = function(*wide).astype(dtype)
    if not all(np.isfinite(x).all() for x in [*wide, result.astype(np.float64)]):
        return result, "rounded"
    back = result.astype(np.float64)
    if name in ("add", "subtract"):
        right = -wide[1] if name == "subtract" else wide[1]
        exact = (_error_of_sum(wide[0], right) == 0) & (back == wide[0] + right)
    elif dtype.itemsize == 8:  # a product has no exact type here
        exact = np.zeros(result.shape, bool)
    elif name == "multiply":
        exact = back == wide[0] * wide[1]
    elif name == "divide":
        exact = back * wide[1] == wide[0]
    else:
        exact = back * back == wide[0]
    return result, "exact" if np.all(exact) else "rounded"


# ---------------------------------------------------------------------- everything


def evaluate(name: str, operands: list[np.ndarray]) -> Evaluated | None:
    """Evaluates an elementwise operation on arrays of one type.

    Args:
      name: without its dialect, such as "add".
      operands: arrays of one shape and type.

    Returns:
      (result, kind), or None where it is better not evaluated: not known, undefined
      (a division by zero), or with values that some hardware flushes to zero.
    """
    dtype = operands[0].dtype
    with np.errstate(all="ignore"):
        if dtype == np.bool_:
            function = _BOOLEAN.get(name)
            return None if function is None else (function(*operands), "exact")
        if _is_integer(dtype):
            integer = _INTEGER.get(name)
            result = None if integer is None else integer(*operands)
            return None if result is None else (np.asarray(result, dtype), "exact")
        if not is_float(dtype) or any(has_subnormals(x) for x in operands):
            return None
        found = _evaluate_floats(name, operands)
        return None if found is None or has_subnormals(found[0]) else found


def is_known(name: str) -> bool:
    """Returns whether `evaluate` can do an operation, on some type."""
    tables = _INTEGER, _BOOLEAN, _FLOAT_EXACT, _FLOAT_ROUNDED, _FLOAT_APPROXIMATE
    return any(name in table for table in tables)


_COMPARE: dict[str, Callable[[Any, Any], np.ndarray]] = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less,
    "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
}  # fmt: skip


def compare(direction: str, kind: str, operands: list[np.ndarray]) -> Evaluated | None:
    """Compares arrays; `kind` is SIGNED, UNSIGNED, FLOAT, TOTALORDER or ""."""
    left, right = operands
    dtype = left.dtype
    if is_float(dtype):
        if kind == "TOTALORDER" or has_subnormals(left) or has_subnormals(right):
            return None
        left, right = left.astype(np.float64), right.astype(np.float64)
    elif dtype.kind == "c":
        if direction not in ("EQ", "NE"):
            return None
    elif dtype != np.bool_ and not _is_integer(dtype):
        return None
    elif kind == "UNSIGNED" and dtype.kind == "i":
        unsigned = np.dtype(f"u{dtype.itemsize}")
        left, right = left.view(unsigned), right.view(unsigned)
    return _COMPARE[direction](left, right), "exact"


def convert(value: np.ndarray, new: np.dtype) -> Evaluated | None:
    """Converts an array, where every device gives the same.

    None for values that the new type does not reach, for NaN in integers, and for
    subnormal numbers.
    """
    old = value.dtype
    if old.kind == "c" or new.kind == "c" or has_subnormals(value):
        return None
    with np.errstate(all="ignore"):
        if new == np.bool_:
            return value != np.asarray(0, old), "exact"
        if _is_integer(new):
            return _to_integer(value, new)
        if not is_float(new) or not (_is_plain_number(old) or is_float(old)):
            return None
        result = value.astype(new)
        if has_subnormals(result):
            return None
        wide = value.astype(np.float64)
        back = result.astype(np.float64)
        same = (back == wide) | (np.isnan(back) & np.isnan(wide))
        if old.kind in "iu" and old.itemsize == 8:
            same &= wide.astype(object) == value.astype(object)
        if np.all(same):
            made = np.isnan(back).any()
            return result, "rounded" if made else "exact"
        # ml_dtypes goes through float32 and would round twice.
        once = (new.kind == "f" and new.itemsize >= 4) or old == np.float32
        if not once or not np.array_equal(np.isfinite(back), np.isfinite(wide)):
            return None
        return result, "rounded"


def _is_plain_number(dtype: np.dtype) -> bool:
    return dtype == np.bool_ or _is_integer(dtype)


def _to_integer(value: np.ndarray, new: np.dtype) -> Evaluated | None:
    if _is_plain_number(value.dtype):
        return value.astype(new), "exact"  # keeps the low bits
    if not is_float(value.dtype):
        return None
    wide = np.trunc(value.astype(np.float64))
    info = np.iinfo(new)
    # float(max) of 64 bits is one too large, hence the strict comparison
    if not ((wide >= float(info.min)) & (wide < float(info.max) + 1)).all():
        return None
    if new.itemsize == 8 and (np.abs(wide) >= 2.0**62).any():
        return None
    return wide.astype(new), "exact"
