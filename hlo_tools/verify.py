"""Checks a bound site against its decomposition, on random inputs."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.extend.mlir import ir

from hlo_tools.module import drop_shardings
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
# The same for gradients, whose sums are longer and cancel more.
GRADIENT_TOLERANCES: dict[str, dict[str, float]] = {
    "float64": {"cpu": 1e-10, "gpu": 1e-10, "tpu": 2e-2},
    "float32": {"cpu": 1e-4, "gpu": 1e-2, "tpu": 4e-2},
    "float16": {"cpu": 2e-2, "gpu": 2e-2, "tpu": 4e-2},
    "bfloat16": {"cpu": 4e-2, "gpu": 4e-2, "tpu": 4e-2},
}
_NARROWNESS = ("bfloat16", "float16", "float32", "float64")


def tolerance_of(dtypes: Sequence[str], platform: str, gradient: bool = False) -> float:
    """Returns the tolerance for values that pass through `dtypes`."""
    narrowest = min(dtypes, key=_NARROWNESS.index)
    return (GRADIENT_TOLERANCES if gradient else TOLERANCES)[narrowest][platform]


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
    """Returns the text of a module, for one device, whose @main is `function`."""
    with function.context, ir.Location.unknown(function.context):
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            copy = function.operation.clone()
        drop_shardings(copy)
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


def compare_all(
    got: Sequence[np.ndarray], want: Sequence[np.ndarray], tolerance: float
) -> VerifyResult:
    """Compares all results of a program with their references.

    Returns:
      The worst of the results; its number is in the detail when there are several.
    """
    if len(got) != len(want):
        detail = f"{len(got)} results, and the reference has {len(want)}"
        return VerifyResult(False, np.nan, tolerance, detail)
    found = []
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            detail = f"{one.dtype}{one.shape}, expected {other.dtype}{other.shape}"
            result = VerifyResult(False, np.nan, tolerance, detail)
        else:
            result = compare(one, other, tolerance)
        if len(want) > 1:
            rest = f": {result.detail}" * bool(result.detail)
            detail = f"result {number} of {len(want)}{rest}"
            result = dataclasses.replace(result, detail=detail)
        found.append(result)
    if not found:
        return VerifyResult(True, 0.0, tolerance, "no results to compare")
    return worst(found)


def worst(results: Sequence[VerifyResult]) -> VerifyResult:
    """Returns the first that failed with a NaN, else the one of largest error."""
    return max(results, key=_badness)


def _badness(result: VerifyResult) -> tuple[bool, float]:
    error = result.max_error
    return not result.passed, np.inf if np.isnan(error) else error


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
