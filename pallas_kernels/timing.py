"""The time of one call of a function on the device at hand."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

# Calls go on until this much time is measured, or this many are.
_ENOUGH_SECONDS = 0.05
_FEWEST, _MOST = 5, 50


@dataclass(frozen=True)
class Timing:
    """Times of several calls.

    Attributes:
      seconds: the median.
      timer: "profiler" for the time that kernels run, "wall" for that of the host.
      note: why it is not the better of the two, or "".
    """

    seconds: float
    timer: str
    note: str = ""


def time_call(fn: Callable[..., Any], *arrays: Any) -> Timing:
    """Measures a function: by CUPTI on an NVIDIA GPU, otherwise by the clock.

    Args:
      fn: compiled here, with `jax.jit`.
      *arrays: its inputs, pytrees.

    Raises:
      Exception: whatever compiling or running it raises.
    """
    run = jax.jit(fn)
    jax.block_until_ready(run(*arrays))
    return time_compiled(run, *arrays)


def time_compiled(
    run: Callable[..., Any], *arrays: Any, seconds: float = _ENOUGH_SECONDS
) -> Timing:
    """As `time_call`, of what `jax.jit` or its `compile` returned, and that has run.

    Args:
      run: the compiled function.
      *arrays: its inputs, pytrees.
      seconds: calls go on until this much time is measured, within 5 and 50 calls.
    """
    started = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    once = time.perf_counter() - started
    calls = int(np.clip(seconds / max(once, 1e-6), _FEWEST, _MOST))
    if jax.default_backend() != "gpu":
        note = f"{jax.default_backend()}: wall clock, dispatch included"
        return Timing(_wall_seconds(run, arrays, calls), "wall", note)
    try:
        return Timing(_profiled_seconds(run, arrays, calls), "profiler")
    except (ImportError, RuntimeError) as error:
        # CUPTI takes one subscriber, and some drivers forbid it
        note = f"wall clock, dispatch included: no device times: {error}"
        return Timing(_wall_seconds(run, arrays, calls), "wall", note)


def _profiled_seconds(run: Callable[..., Any], arrays: Any, calls: int) -> float:
    from jax.experimental.mosaic.gpu import profiler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        _, found = profiler.measure(run, iterations=calls)(*arrays)
    if not found:
        raise RuntimeError("no kernel ran")
    return float(np.median(found)) / 1e3


def _wall_seconds(run: Callable[..., Any], arrays: Any, calls: int) -> float:
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))
