"""Processes that measure together: they compile side by side, and run in turns.

Compiling takes a core for seconds, running the device for a tenth of one.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from hlo_tools.targets import Target
from pallas_kernels.families import FAMILIES, family_at
from pallas_kernels.kernel import KernelFamily
from pallas_kernels.measuring import Tried, try_config
from pallas_kernels.timing import Timing, time_compiled

# Configurations that a process takes at a time.
_AT_A_TIME = 8
# Of each configuration; their kernels take far less.
_SECONDS = 0.02

_turn: Any = None
_inputs: dict[tuple[str, str], Any] = {}


def try_all(
    family: KernelFamily, problems: Sequence[Any], target: Target, workers: int
) -> Iterator[tuple[Any, Tried]]:
    """Yields (problem, configuration tried), as they get done.

    Args:
      family: the kernel, a row of `pallas_kernels.families`.
      problems: what to compute.
      target: the device at hand.
      workers: how many processes.
    """
    # They share the device's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        workers, context, _start, (context.Lock(),)
    ) as pool:
        started = {}
        for problem in problems:
            configs = [x.to_dict() for x in family.candidates(problem, target)]
            for first in range(0, len(configs), _AT_A_TIME):
                part = configs[first : first + _AT_A_TIME]
                work = pool.submit(
                    _try_some, FAMILIES[family.name], family.key(problem), part
                )
                started[work] = problem
        for work in concurrent.futures.as_completed(started):
            for tried in work.result():
                yield started[work], tried


def _start(turn: Any) -> None:
    global _turn
    _turn = turn


def _try_some(place: str, key: str, configs: list[dict[str, Any]]) -> list[Tried]:
    family = family_at(place)
    problem = family.problem_of(key)
    if (place, key) not in _inputs:
        _inputs.clear()
        with _turn:
            _inputs[place, key] = jax.block_until_ready(family.make_inputs(problem, 0))
    return [
        try_config(
            family,
            problem,
            family.config_class.from_dict(config),
            _inputs[place, key],
            _time_in_turn,
        )
        for config in configs
    ]


def _time_in_turn(fn: Any, *arrays: Any) -> Timing:
    run = jax.jit(fn).lower(*arrays).compile()
    with _turn:
        jax.block_until_ready(run(*arrays))
        return time_compiled(run, *arrays, seconds=_SECONDS)
