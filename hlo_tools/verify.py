"""Checks a bound site against its decomposition, on random inputs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.extend.mlir import ir

from hlo_tools.report import SiteReport, VerifyResult

# Largest difference allowed, as a part of the largest magnitude of the result, by
# the narrowest type on the way and the platform.  A product of float32 operands
# at default precision is tf32 on GPU and bfloat16 on TPU.
TOLERANCES: dict[str, dict[str, float]] = {
    "float64": {"cpu": 1e-11, "gpu": 1e-11, "tpu": 1e-2},
    "float32": {"cpu": 2e-5, "gpu": 5e-3, "tpu": 2e-2},
    "float16": {"cpu": 5e-3, "gpu": 5e-3, "tpu": 2e-2},
    "bfloat16": {"cpu": 2e-2, "gpu": 2e-2, "tpu": 2e-2},
}
_NARROWNESS = ("bfloat16", "float16", "float32", "float64")


def tolerance_of(dtypes: Sequence[str], platform: str) -> float:
    """Returns the tolerance for values that pass through `dtypes`."""
    narrowest = min(dtypes, key=_NARROWNESS.index)
    return TOLERANCES[narrowest][platform]


def random_inputs(
    types: Sequence[jax.ShapeDtypeStruct], seed: int, largest_integer: int
) -> list[np.ndarray]:
    """Returns fresh random arrays: normal floats, mostly true booleans.

    Args:
      types: shapes and dtypes.
      seed: for the generator.
      largest_integer: integers are drawn from 0 to this.
    """
    rng = np.random.default_rng(seed)
    arrays = []
    for one in types:
        if one.dtype == np.bool_:
            array = rng.random(one.shape) < 0.9
        elif np.issubdtype(one.dtype, np.integer):
            array = rng.integers(0, largest_integer + 1, one.shape)
        else:
            array = rng.standard_normal(one.shape)
        arrays.append(np.asarray(array).astype(one.dtype))
    return arrays


def module_of_function(function: ir.OpView) -> str:
    """Returns the text of a module whose @main is `function`."""
    with function.context, ir.Location.unknown(function.context):
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            copy = function.operation.clone()
        copy.attributes["sym_name"] = ir.StringAttr.get("main")
        copy.attributes["sym_visibility"] = ir.StringAttr.get("public")
        return str(module)


@functools.cache
def _device(platform: str):
    """Returns a device of the platform, or None if there is none here."""
    try:
        return jax.local_devices(backend=platform)[0]
    except RuntimeError:
        return None


def can_run(platform: str) -> bool:
    """Returns whether programs for `platform` can run on this machine."""
    return _device(platform) is not None


def run_text(text: str, arguments: Sequence[Any], platform: str) -> list[np.ndarray]:
    """Compiles the text of a module for one device and runs it."""
    device = _device(platform)
    client = jax.extend.backend.get_backend(platform)
    program = client.compile_and_load(text, [device])
    placed = [jax.device_put(argument, device) for argument in arguments]
    results = program.execute_sharded(placed)
    arrays = results.disassemble_into_single_device_arrays()
    return [np.asarray(parts[0]) for parts in arrays]


def compare(got: np.ndarray, want: np.ndarray, tolerance: float) -> VerifyResult:
    """Compares a result with its reference.

    The error is the largest difference over the largest magnitude of `want`; NaN
    must stand where NaN stands.
    """
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        count = int(np.sum(np.isnan(got) != np.isnan(want)))
        return VerifyResult(False, np.nan, tolerance, f"{count} NaNs differ")
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        return VerifyResult(False, np.inf, tolerance, "infinities differ")
    if not finite.any():
        return VerifyResult(True, 0.0, tolerance, "no finite value to compare")
    scale = max(float(np.abs(want[finite]).max()), np.finfo(np.float32).tiny)
    error = float(np.abs(got[finite] - want[finite]).max()) / scale
    return VerifyResult(bool(error <= tolerance), float(error), tolerance, "")


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
      reference: text of a module of one result.
      candidate: text of a module that should compute the same.
      types: arguments of the reference.
      places: which of them, in order, the candidate takes.
      platform: where to run.
      tolerance: relative to the largest magnitude of the reference.
      largest_integer: bound of random integers.
      draws: how many sets of inputs.

    Returns:
      The worst of the draws.
    """
    worst = None
    for seed in range(draws):
        inputs = random_inputs(types, seed, largest_integer)
        want = run_text(reference, inputs, platform)[0]
        got = run_text(candidate, [inputs[place] for place in places], platform)[0]
        result = compare(got, want, tolerance)
        detail = result.detail or f"{draws} sets of random inputs on {platform}"
        result = VerifyResult(result.passed, result.max_error, result.tolerance, detail)
        if not result.passed:
            return result
        if worst is None or result.max_error > worst.max_error:
            worst = result
    assert worst is not None
    return worst


def rolled_back(name: str, result: VerifyResult) -> str:
    """Returns the reason of a site whose implementation failed its check."""
    return (
        f"{name} differs from the original by {result.max_error:.3g} "
        f"(allowed {result.tolerance:.3g}): rolled back"
    )


def announce(report: SiteReport) -> None:
    """Says on stderr that a site failed its check."""
    print(
        f"hlo_tools: {report.id} at {report.location}: {report.reason}", file=sys.stderr
    )
