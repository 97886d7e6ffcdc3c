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
_HEX = re.compile(r"dense<0x([0-9A-F]{4})> : tensor<([0-9x]*)bf16>")


def widened(text: str) -> str:
    """Returns a bfloat16 program with float32 in the place of bfloat16."""
    text = _ALGORITHM.sub("", text)
    text = _HEX.sub(r"dense<0x\g<1>0000> : tensor<\g<2>bf16>", text)
    return text.replace("bf16", "f32")


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
    """Compares two programs; a low-precision one with its float32 form.

    The rewritten program's error against float32 may be at most twice the
    original's, plus what float32 itself leaves open.
    """
    arrays = inputs_of(original, seed)
    before, after = run(original, arrays), run(rewritten, arrays)
    if "bf16" not in original:
        for number, error in enumerate(errors(after, before)):
            assert error <= 3e-5, f"result {number} differs by {error:.3g}"
        return
    exact = run(widened(original), arrays)
    pairs = zip(errors(after, exact), errors(before, exact), strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        assert ours <= 2 * theirs + 1e-5, (
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
