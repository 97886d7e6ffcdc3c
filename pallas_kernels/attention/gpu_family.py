"""The families of the Hopper attention kernels: their choices, limits and times.

The kernels themselves are in gpu_forward.py and gpu_backward.py, loaded when one is
run.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hlo_tools.chips import gpu_chip
from hlo_tools.errors import UnsupportedError
from hlo_tools.targets import Target
from pallas_kernels.attention import gpu_presets
from pallas_kernels.attention import hopper_attention as work
from pallas_kernels.attention.gpu_backward_plan import BackwardConfig
from pallas_kernels.attention.gpu_forward_plan import ForwardConfig
from pallas_kernels.attention.hopper_model import (
    MOST_REGISTERS,
    OVERHEAD_REGISTERS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    add_predictions,
    default_constants,
    scaled_prediction,
)
from pallas_kernels.attention.problem import AttentionProblem
from pallas_kernels.kernel import KernelFamily, Prediction
from pallas_kernels.tuning import ConfigSelector

HOPPER = ("h100", "h100-pcie", "h200")
DTYPES = ("bfloat16", "float16")
# Keys and queries of a tile: what a row of swizzled shared memory, of 2-byte elements,
# has room for, and multiples.
KEY_BLOCKS = (64, 128, 192, 256)
STAGES = (2, 3)
MOST_DEPTH = 256
CONSTANTS = default_constants()


def refuse_problem(problem: AttentionProblem, target: Target) -> str | None:
    """Returns why no configuration can run a problem, or None."""
    if target.spec.name not in HOPPER:
        return f"the kernels are for Hopper GPUs, not {target.spec.name}"
    if problem.dtype not in DTYPES:
        return f"operands are {problem.dtype}, not one of {', '.join(DTYPES)}"
    for name in ("head_dim", "value_dim"):
        dim = getattr(problem, name)
        if dim % 64 or not 0 < dim <= MOST_DEPTH:
            return f"{name} {dim} is no multiple of 64 up to {MOST_DEPTH}"
    return None


def _refuse_sizes(
    target: Target, smem: int, registers: int, warpgroups: int
) -> str | None:
    """Shared memory and registers; for the reports, the reason has no numbers."""
    if smem > gpu_chip(target.spec).smem_per_block:
        return "more shared memory than a CTA can have"
    if registers > MOST_REGISTERS[warpgroups]:
        return (
            f"more than the {MOST_REGISTERS[warpgroups]} registers a thread of"
            f" {warpgroups} compute warpgroups can have"
        )
    return None


def _forward_space(
    problem: AttentionProblem, target: Target
) -> Iterator[ForwardConfig]:
    for stages in STAGES:
        for warpgroups in (2, 3, 1):
            for block_kv in KEY_BLOCKS:
                for persistent in (False, True):
                    # persistent blocks have no registers left for an overlap
                    for overlap in (False,) if persistent else (False, True):
                        yield ForwardConfig(
                            block_kv, stages, warpgroups, persistent, overlap
                        )


def _refuse_forward(
    problem: AttentionProblem, config: ForwardConfig, target: Target
) -> str | None:
    reason = refuse_problem(problem, target) or _refuse_tile(
        config.compute_warpgroups, config.block_kv, 256
    )
    if reason is not None:
        return reason
    registers = work.forward_registers(problem, WARPGROUP_ROWS, config.block_kv)
    return _refuse_sizes(
        target, config.shared_bytes(problem), registers, config.compute_warpgroups
    )


def _refuse_tile(warpgroups: int, tile: int, most: int) -> str | None:
    """Sizes that the kernels' layout has no place for."""
    if warpgroups not in MOST_REGISTERS:
        return f"compute_warpgroups is none of {tuple(MOST_REGISTERS)}"
    if tile % 64 or not 64 <= tile <= most:
        return f"a tile has a multiple of 64 columns up to {most}"
    return None


def _predict_forward(
    problem: AttentionProblem, config: ForwardConfig, target: Target
) -> Prediction:
    predicted = work.forward_prediction(
        problem, config.block_q, config.block_kv, config.stages,
        config.compute_warpgroups, target, CONSTANTS,
    )  # fmt: skip
    return scaled_prediction(predicted, _schedule_factor(problem, config))


def _schedule_factor(problem: AttentionProblem, config: ForwardConfig) -> float:
    """Returns the time of a schedule over that of the best one.

    Estimates, from a few shapes on an H200; measured tables are to take their place.
    Blocks that stay save their starts where all are equally long, and cost registers
    where masks come in several loops; overlap pays where exponentials are the limit,
    or products are long.
    """
    banded = problem.band != (None, None)
    deep, flat = problem.head_dim > 128, problem.head_dim <= 64
    factor = 1.0
    if config.persistent:
        factor *= 1.03 if banded else 0.99
    if config.overlap:
        factor *= 0.97 if deep or (flat and not banded) else 1.03
    return factor


def _backward_space(
    problem: AttentionProblem, target: Target
) -> Iterator[BackwardConfig]:
    for two_kernels in (False, True):
        for stages in (2, 3, 1):
            for warpgroups in (2, 1):
                for block_q in (64, 128):
                    yield BackwardConfig(
                        block_q, stages, warpgroups, two_kernels=two_kernels
                    )
            yield BackwardConfig(64, stages, 2, deep=True, two_kernels=two_kernels)


def _refuse_backward(
    problem: AttentionProblem, config: BackwardConfig, target: Target
) -> str | None:
    reason = refuse_problem(problem, target) or _refuse_tile(
        config.compute_warpgroups, config.block_q, 128
    )
    if reason is not None:
        return reason
    reason = (_refuse_deep if config.deep else _refuse_parts)(problem, config)
    if reason is not None:
        return reason
    if config.two_kernels:
        smem = config.queries_shared_bytes(problem)
        reason = _refuse_sizes(target, smem, 0, config.compute_warpgroups)
        if reason is not None:
            return reason
    registers = _backward_registers(problem, config)
    return _refuse_sizes(
        target,
        config.shared_bytes(problem, problem.bias is not None),
        registers,
        config.compute_warpgroups,
    )


def _refuse_parts(problem: AttentionProblem, config: BackwardConfig) -> str | None:
    _, columns = config.dq_part(problem.head_dim)
    fits = config.two_kernels or columns % 64 == 0
    if config.block_q not in (64, 64 * config.compute_warpgroups) or not fits:
        return "the warpgroups' parts of dq are no whole tiles"
    return None


def _refuse_deep(problem: AttentionProblem, config: BackwardConfig) -> str | None:
    if (config.compute_warpgroups, config.block_q) != (2, 64):
        return "two warpgroups that share their keys take 64 queries"
    if problem.head_dim % 128:
        return "half of the columns of dq are no whole tiles"
    return None


def _backward_registers(problem: AttentionProblem, config: BackwardConfig) -> int:
    if config.deep:  # one gradient and half of a tile's dq
        kept = config.block_kv * max(problem.head_dim, problem.value_dim)
        part = 0 if config.two_kernels else config.block_q * problem.head_dim // 2
        return round((kept + part) / WARPGROUP_THREADS) + OVERHEAD_REGISTERS
    products = ("dk", "dv") if config.two_kernels else ("dk", "dv", "dq part")
    return work.backward_registers(
        problem, config.block_q, config.block_kv, config.compute_warpgroups, products
    )


def _predict_backward(
    problem: AttentionProblem, config: BackwardConfig, target: Target
) -> Prediction:
    kernel = work.dkv_prediction(
        problem, config.block_q, config.block_kv, config.stages,
        config.compute_warpgroups, target, CONSTANTS, has_dq=not config.two_kernels,
    )  # fmt: skip
    parts = [
        kernel,
        work.delta_prediction(problem, target, CONSTANTS),
        work.group_prediction(problem, target, CONSTANTS),
    ]
    if not config.two_kernels:
        return add_predictions(
            *parts, work.dq_traffic_prediction(problem, target, CONSTANTS)
        )
    queries = config.queries_kernel(problem)
    second = work.dq_prediction(
        problem, queries.block_q, queries.block_kv, queries.stages,
        queries.compute_warpgroups, target, CONSTANTS,
    )  # fmt: skip
    return add_predictions(*parts, second)


def _runner(module: str, function: str) -> Callable[[Any, Any], Callable[..., Any]]:
    """Of (problem, config): the kernel as a function of its arrays."""

    def run(problem: AttentionProblem, config: Any) -> Callable[..., Any]:
        name = f"pallas_kernels.attention.{module}"
        try:
            kernel = getattr(importlib.import_module(name), function)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise UnsupportedError(f"this version has no {name}") from error
        return lambda *arrays: kernel(problem, config, *arrays)

    return run


FORWARD = KernelFamily(
    name="attention-forward",
    problem_class=AttentionProblem,
    config_class=ForwardConfig,
    space=_forward_space,
    refuse=_refuse_forward,
    predict=_predict_forward,
    make_inputs=gpu_presets.forward_inputs,
    run=_runner("gpu_forward", "flash_forward"),
    presets=gpu_presets.PRESETS,
)
BACKWARD = KernelFamily(
    name="attention-backward",
    problem_class=AttentionProblem,
    config_class=BackwardConfig,
    space=_backward_space,
    refuse=_refuse_backward,
    predict=_predict_backward,
    make_inputs=gpu_presets.backward_inputs,
    run=_runner("gpu_backward", "flash_backward"),
    presets=gpu_presets.PRESETS,
)


@functools.cache
def choose_forward(problem: AttentionProblem) -> ForwardConfig:
    """Returns the configuration of the forward kernel.

    Raises:
      UnsupportedError: none can run; says why.
    """
    config = ConfigSelector(FORWARD, Target.parse("h200")).select(problem).config
    assert isinstance(config, ForwardConfig)
    return config


@functools.cache
def choose_backward(
    problem: AttentionProblem, deterministic: bool = False
) -> BackwardConfig:
    """Returns the configuration of the backward kernel.

    Args:
      problem: what is computed.
      deterministic: one in which nothing is added in any order.

    Raises:
      UnsupportedError: none can run; says why.
    """
    config = ConfigSelector(BACKWARD, Target.parse("h200")).select(problem).config
    assert isinstance(config, BackwardConfig)
    return replace(config, two_kernels=True) if deterministic else config
