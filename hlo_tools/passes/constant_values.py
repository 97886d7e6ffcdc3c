"""Constants as NumPy arrays, and NumPy arrays as constants.

The bindings read only some element types; the others (bfloat16, 8-bit and smaller
types, complex numbers) are read from MLIR's text, which is exact.
"""

from __future__ import annotations

import math
import re

import numpy as np
from jax.extend.mlir import ir

from hlo_tools.rewriting import (
    Rewriter,
    element_type,
    is_plain,
    numpy_dtype,
    producer,
    shape_of,
)

CONSTANT = "stablehlo.constant"
# What the bindings hand over as a buffer.
_DIRECT = frozenset("f16 f32 f64 i1 i8 i16 i32 i64 ui8 ui16 ui32 ui64".split())
_BODY = re.compile(r"dense<(.*)> : tensor<", re.DOTALL)
_TOKEN = re.compile(r"0x[0-9A-Fa-f]+|[-+]?[\d.]+(?:[eE][-+]?\d+)?|true|false")
_COMPLEX = {"complex<f32>": np.dtype("complex64"), "complex<f64>": np.dtype("c16")}


def dtype_of(kind: ir.Type) -> np.dtype | None:
    """Returns the NumPy type of an element type; None if there is none."""
    text = str(kind)
    if text in _COMPLEX:
        return _COMPLEX[text]
    try:
        return numpy_dtype(kind)
    except TypeError:
        return None


def constant_of(value: ir.Value) -> ir.Operation | None:
    """Returns the plain constant that makes a value of static shape, else None."""
    op = producer(value, CONSTANT)
    if op is None or not is_plain(op) or shape_of(value) is None:
        return None
    return op


def read_constant(value: ir.Value, limit: int) -> np.ndarray | None:
    """Returns the elements of a constant.

    Args:
      value: any value.
      limit: a constant of more elements is read only if they are all the same.

    Returns:
      An array of the value's shape, not to be written to: where all elements are the
      same, it may be a view of one. None: no constant, too large, or of a type that
      NumPy does not have.
    """
    op = constant_of(value)
    if op is None:
        return None
    shape, kind = tuple(value.type.shape), element_type(value)
    dtype = dtype_of(kind)
    if dtype is None:
        return None
    if str(kind) in _COMPLEX:
        # The bindings can not hand out the attribute, so ask for its text alone.
        if math.prod(shape) > limit:
            return None
        return _from_text(str(op), shape, dtype)
    attribute = op.attributes["value"]
    if not isinstance(attribute, ir.DenseElementsAttr):
        return None
    if attribute.is_splat and math.prod(shape):
        number = attribute.get_splat_value().value
        return np.broadcast_to(np.asarray(number, dtype), shape)
    if math.prod(shape) > limit:
        return None
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    if str(kind) in _DIRECT:
        return np.array(attribute).reshape(shape)
    return _from_text(str(attribute), shape, dtype)


def _from_text(text: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
    """Reads `dense<...>`; None if it is written in a way that is not known."""
    found = _BODY.search(text)
    if found is None:
        return None
    body, count = found[1], math.prod(shape)
    if body.startswith('"0x'):  # all bytes, in memory order
        data = np.frombuffer(bytes.fromhex(body[3:-1]), dtype)
    else:
        data = _from_tokens(_TOKEN.findall(body), dtype)
    if data is None:
        return None
    if data.size == 1:
        return np.broadcast_to(data.reshape(()), shape)
    return data.reshape(shape) if data.size == count else None


def _from_tokens(tokens: list[str], dtype: np.dtype) -> np.ndarray | None:
    if dtype.kind == "c":
        parts = _from_tokens(tokens, np.dtype(f"f{dtype.itemsize // 2}"))
        return None if parts is None else parts.view(dtype)
    bits = np.dtype(f"u{dtype.itemsize}")
    values = np.empty(len(tokens), dtype)
    for place, token in enumerate(tokens):
        if token.startswith("0x"):  # the bits of a float that decimals can not tell
            values[place] = np.asarray(int(token, 16), bits).view(dtype)
        elif "." in token or "e" in token:
            values[place] = np.asarray(float(token), dtype)
        else:
            values[place] = np.asarray(int(token), dtype)
    return values


def is_splat(array: np.ndarray) -> bool:
    """Returns whether an array is known to have one value only."""
    return array.size > 0 and (array.size == 1 or not any(_steps(array)))


def _steps(array: np.ndarray) -> list[int]:
    pairs = zip(array.strides, array.shape, strict=True)
    return [step for step, extent in pairs if extent > 1]


def make_constant(rewriter: Rewriter, array: np.ndarray, kind: ir.Type) -> ir.Value:
    """Makes a constant of a tensor type; bit for bit the array's elements."""
    shape, element = list(kind.shape), kind.element_type
    whole = array.reshape(-1)[:1] if is_splat(array) else array
    data = np.array(whole, order="C")  # of its own, and writable as a buffer
    if data.dtype.kind not in "biufc":
        data = data.view(np.dtype(f"u{data.dtype.itemsize}"))
    if is_splat(array):
        value = _splat(data, shape, element)
    else:
        value = ir.DenseElementsAttr.get(data, type=element, shape=shape)
    return rewriter.create(CONSTANT, [], kind, {"value": value})


def _splat(data: np.ndarray, shape: list[int], element: ir.Type) -> ir.Attribute:
    one = ir.DenseElementsAttr.get(data, type=element, shape=[1])
    if isinstance(element, ir.ComplexType):
        count = math.prod(shape)
        repeated = np.repeat(data, count)
        return ir.DenseElementsAttr.get(repeated, type=element, shape=shape)
    kind = ir.RankedTensorType.get(shape, element)
    return ir.DenseElementsAttr.get_splat(kind, _first(one, element))


def _first(one: ir.Attribute, element: ir.Type) -> ir.Attribute:
    text = str(one)
    cast = ir.Attribute.parse(text)  # as its own class, which has the accessor
    return cast.get_splat_value()
