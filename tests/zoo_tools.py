"""Helpers of the tests that run whole StableHLO programs."""

import re

import jax
import numpy as np
from jax.extend.mlir import ir

from hlo_tools.matching.canonical import DTYPE_NAMES
from hlo_tools.matching.reader import dtype_of, loop_invariant, shape_of
from hlo_tools.module import StableHloModule
from hlo_tools.verify import run_text

_ALGORITHM = re.compile(r", algorithm = <[^>]*>")
_HEX = re.compile(r'dense<"?0x([0-9A-Fa-f]+)"?> : tensor<([0-9x]*)(bf16|f16|f32)>')


def widened(text: str) -> str:
    """Returns a program with float64 in the place of narrower types."""

    def wider(found: re.Match) -> str:
        digits, shape, old = found.groups()
        dtype = np.dtype("uint32" if old == "f32" else "uint16")
        if '"' in found.group(0):  # a whole array, bytes in memory order
            bits = np.frombuffer(bytes.fromhex(digits), dtype)
        else:
            bits = np.asarray([int(digits, 16)], dtype)
        narrow = {"bf16": jax.numpy.bfloat16, "f16": "float16", "f32": "float32"}
        wide = bits.view(narrow[old]).astype("float64")
        if '"' in found.group(0):
            return f'dense<"0x{wide.tobytes().hex().upper()}"> : tensor<{shape}f64>'
        return f"dense<0x{int(wide.view('uint64')[0]):016X}> : tensor<{shape}f64>"

    text = _HEX.sub(wider, _ALGORITHM.sub("", text))
    return re.sub(r"(?<![a-zA-Z_])((?:\d+x)*)(?:bf16|f16|f32)\b", r"\1f64", text)


def inputs_of(text: str, seed: int = 0) -> list[np.ndarray]:
    """Returns random inputs of sizes that keep a model's activations near 1."""
    module = StableHloModule.parse(text)
    rng = np.random.default_rng(seed)
    arrays = []
    for value in module.main.regions[0].blocks[0].arguments:
        shape, dtype = shape_of(value), jax.numpy.dtype(DTYPE_NAMES[dtype_of(value)])
        if dtype == np.bool_:
            array = rng.random(shape) < 0.8
        elif np.issubdtype(dtype, np.integer):
            array = rng.integers(1, 60, shape)
        else:
            fan_in = shape[0] if len(shape) > 1 and shape[0] > 2 else 1
            array = rng.standard_normal(shape) / np.sqrt(fan_in)
        arrays.append(np.asarray(array).astype(dtype))
    return arrays


def run(text: str, arrays) -> list[np.ndarray]:
    """Runs a program on CPU, with its inputs cast to the types that it takes."""
    module = StableHloModule.parse(text)
    values = list(module.main.regions[0].blocks[0].arguments)
    cast = [
        array.astype(jax.numpy.dtype(DTYPE_NAMES[dtype_of(value)]))
        for array, value in zip(arrays, values, strict=True)
    ]
    return [np.asarray(x).astype(np.float64) for x in run_text(text, cast, "cpu")]


def errors(got, want) -> list[float]:
    """Returns, for each result, the largest difference over the largest value."""
    result = []
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(np.isnan(g), np.isnan(w))
        scale = max(float(np.nanmax(np.abs(w), initial=0.0)), 1e-30)
        result.append(float(np.nanmax(np.abs(g - w), initial=0.0)) / scale)
    return result


def assert_same_values(original: str, rewritten: str, seed: int = 0) -> None:
    """Compares two programs, and both with the program in float64.

    The rewritten program's error may be at most twice the original's, plus what
    float32 itself leaves open: 1e-5 of the result's largest value, or 3e-7 of the
    largest of any result's (a gradient that is zero in theory is all rounding).
    """
    arrays = inputs_of(original, seed)
    before, after = run(original, arrays), run(rewritten, arrays)
    with jax.enable_x64(True):
        exact = run(widened(original), arrays)
    largest = max(float(np.nanmax(np.abs(x), initial=0.0)) for x in exact)
    pairs = zip(errors(after, exact), errors(before, exact), exact, strict=True)
    for number, (ours, theirs, want) in enumerate(pairs):
        scale = max(float(np.nanmax(np.abs(want), initial=0.0)), 1e-30)
        assert ours <= max(2 * theirs + 1e-5, 3e-7 * largest / scale), (
            f"result {number}: {ours:.3g} > 2*{theirs:.3g}"
        )


def results_of(function) -> list[int]:
    """Returns a hash of what each result of a function is computed by.

    Equal hashes mean equal operations on equal operands, whatever their order in
    the text.
    """
    memo: dict = {}

    def of_value(value, depth: int) -> int:
        value = loop_invariant(value)  # what a loop hands on is what came in
        if value in memo:
            return memo[value]
        op = value.owner
        if isinstance(op, ir.Block):
            found = hash(("argument", depth, ir.BlockArgument(value).arg_number))
        else:
            found = hash((of_op(op.operation, depth), ir.OpResult(value).result_number))
        memo[value] = found
        return found

    def of_op(op, depth: int) -> int:
        attributes = tuple(sorted((n, str(op.attributes[n])) for n in op.attributes))
        operands = tuple(of_value(value, depth) for value in op.operands)
        types = tuple(str(result.type) for result in op.results)
        regions = tuple(of_region(region, depth + 1) for region in op.regions)
        return hash((op.name, attributes, operands, types, regions))

    def of_region(region, depth: int) -> tuple[int, ...]:
        blocks = list(region.blocks)
        if not blocks:
            return ()
        for number, value in enumerate(blocks[0].arguments):
            memo[value] = hash(("argument", depth, number))
        last = list(blocks[0].operations)[-1]
        return tuple(of_value(value, depth) for value in last.operands)

    return list(of_region(function.regions[0], 0))
