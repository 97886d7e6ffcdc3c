"""Runs whole programs for a comparison: their inputs, and a reference to trust.

A low-precision program is compared with itself in float32: two correct programs may
round in different places, and differ more from each other than from the truth.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir

from hlo_tools.matching.canonical import DTYPE_NAMES
from hlo_tools.matching.reader import dtype_of, shape_of
from hlo_tools.module import StableHloModule
from hlo_tools.report import VerifyResult
from hlo_tools.verify import compare_all, random_inputs, run_text, tolerance_of, worst

_FLOATS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
# An element type: by itself or after a dimension, "tensor<f32>" or "tensor<8xf32>".
_ELEMENT = re.compile(r"(?:(?<!\w)|(?<=\dx))(bf16|f16|f32|f64)(?!\w)")
_NARROW = re.compile(r"(?:(?<!\w)|(?<=\dx))(?:bf16|f16)(?!\w)")
_ALGORITHM = re.compile(r",? ?algorithm = <[^>]*>")
_HEX = re.compile(r'dense<"?0x([0-9A-F]+)"?> : tensor<((?:\d+x)*)(bf16|f16)>')

# Integers of a random input: token ids, positions, lengths of a small program.
LARGEST_INTEGER = 63


def argument_types(text: str) -> list[jax.ShapeDtypeStruct]:
    """Returns what the entry function of a module takes."""
    module = StableHloModule.parse(text)
    values = module.main.regions[0].blocks[0].arguments
    return [
        jax.ShapeDtypeStruct(shape_of(v), jax.numpy.dtype(_dtype_name(v)))
        for v in values
    ]


def _dtype_name(value: ir.Value) -> str:
    return DTYPE_NAMES[dtype_of(value)]


def float_types(text: str) -> set[str]:
    """Returns the floating-point types that occur in a module, by NumPy's names."""
    return {_FLOATS[name] for name in _ELEMENT.findall(text)}


def widened(text: str) -> str | None:
    """Returns a bfloat16 or float16 program in float32; None if it is neither.

    Every operation is the same, its type aside. A program that looks at the bits of
    a narrow float does not compile afterwards.
    """
    if not float_types(text) & {"bfloat16", "float16"}:
        return None
    text = _HEX.sub(_wide_constant, _ALGORITHM.sub("", text))
    return _NARROW.sub("f32", text)


def _wide_constant(found: re.Match) -> str:
    digits, shape, kind = found.groups()
    splat = '"' not in found[0]
    # A splat is a number, digits from the left; an array is its bytes in memory.
    raw = bytes.fromhex(digits)[:: -1 if splat else 1]
    wide = np.frombuffer(raw, jax.numpy.dtype(_FLOATS[kind])).astype("<f4").tobytes()
    if splat:
        return f"dense<0x{wide[::-1].hex().upper()}> : tensor<{shape}{kind}>"
    return f'dense<"0x{wide.hex().upper()}"> : tensor<{shape}{kind}>'


def random_arguments(
    types: Sequence[jax.ShapeDtypeStruct], seed: int, small: bool
) -> list[np.ndarray]:
    """Returns random inputs of a program.

    Args:
      types: shapes and dtypes.
      seed: for the generator.
      small: divide what may be a weight by the square root of its first dimension,
        as a model's initialization does; a deep program overflows otherwise.
    """
    arrays = random_inputs(types, seed, LARGEST_INTEGER)
    if not small:
        return arrays
    return [
        (array / np.sqrt(array.shape[0])).astype(array.dtype)
        if array.ndim > 1 and jax.numpy.issubdtype(array.dtype, np.inexact)
        else array
        for array in arrays
    ]


def cast_to(types: Sequence[jax.ShapeDtypeStruct], arrays: Sequence[Any]):
    """Returns arrays in the dtypes that a program takes."""
    return [
        np.asarray(array).astype(one.dtype)
        for one, array in zip(types, arrays, strict=True)
    ]


@dataclass(frozen=True)
class Reference:
    """What a program computes, and how exactly it does.

    Attributes:
      inputs: of the program.
      results: its own.
      exact: the same in float32, for a program of narrower types.
    """

    inputs: list[np.ndarray]
    results: list[np.ndarray]
    exact: list[np.ndarray] | None

    @classmethod
    def of(cls, text: str, inputs: Sequence[np.ndarray], platform: str) -> Reference:
        """Runs a program and, where that is possible, its float32 form."""
        results, wide, exact = run_text(text, inputs, platform), widened(text), None
        if wide is not None:
            try:
                given = cast_to(argument_types(wide), inputs)
                exact = run_text(wide, given, platform)
            except Exception:  # it looks at bits; MLIR's and XLA's errors are many
                exact = None
        return cls(list(inputs), results, exact)

    def judge(self, got: Sequence[np.ndarray], tolerance: float) -> VerifyResult:
        """Compares the results of a program that should compute the same.

        Args:
          got: its results.
          tolerance: largest difference from `results`, as a part of the largest
            magnitude; where `exact` is known, got may instead be at most twice as
            far from it as `results` are, and one rounding more.
        """
        direct = compare_all(got, self.results, tolerance)
        if direct.passed or self.exact is None or len(got) != len(self.exact):
            return direct
        found = []
        pairs = zip(got, self.results, self.exact, strict=True)
        for number, (one, own, exact) in enumerate(pairs):
            single = compare_all([one], [own], tolerance)
            if not single.passed and np.isfinite(single.max_error):
                single = judge_one(one, own, exact)
            detail = f"result {number} of {len(got)}" * (len(got) > 1)
            detail += ": " * bool(detail and single.detail) + single.detail
            found.append(
                VerifyResult(single.passed, single.max_error, single.tolerance, detail)
            )
        return worst(found)


def judge_one(got: np.ndarray, own: np.ndarray, exact: np.ndarray) -> VerifyResult:
    """Compares a low-precision result with float32: twice the original's error."""
    allowed = compare_all([own.astype(exact.dtype)], [exact], 0.0).max_error
    if not np.isfinite(allowed):
        return VerifyResult(False, np.inf, 0.0, "the float32 form is not finite")
    rounding = float(jax.numpy.finfo(own.dtype).eps)
    detail = "against the program in float32"
    result = compare_all([got.astype(exact.dtype)], [exact], 2 * allowed + rounding)
    return VerifyResult(result.passed, result.max_error, result.tolerance, detail)


def program_tolerance(text: str, platform: str, gradient: bool = False) -> float:
    """Returns the tolerance for the results of a program, by its narrowest type."""
    found = sorted(float_types(text))
    return tolerance_of(found, platform, gradient) if found else 0.0


def verify_texts(
    reference: str,
    candidate: str,
    types: Sequence[jax.ShapeDtypeStruct],
    places: Sequence[int],
    platform: str,
    tolerance: float,
    largest_integer: int,
    draws: int = 2,
) -> VerifyResult:
    """Runs two modules on the same random inputs.

    Args:
      reference: text of a module.
      candidate: text of a module that should compute the same, in the same order.
      types: arguments of the reference.
      places: which of them, in order, the candidate takes.
      platform: where to run.
      tolerance: of `Reference.judge`.
      largest_integer: bound of random integers.
      draws: how many sets of inputs.

    Returns:
      The worst result of the worst draw; a draw that fails is the last.
    """
    found = []
    for seed in range(draws):
        inputs = random_inputs(types, seed, largest_integer)
        want = Reference.of(reference, inputs, platform)
        got = run_text(candidate, [inputs[place] for place in places], platform)
        result = want.judge(got, tolerance)
        how = f"{draws} sets of random inputs on {platform}"
        if result.passed and not result.detail:
            result = dataclasses.replace(result, detail=how)
        elif result.passed:
            result = dataclasses.replace(result, detail=f"{result.detail}; {how}")
        found.append(result)
        if not result.passed:
            break
    return worst(found)
