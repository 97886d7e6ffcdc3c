"""The families of the Hopper attention kernels: their choices, limits and times.

The kernels themselves are in gpu_forward.py, gpu_backward.py and
gpu_backward_two_kernels.py, loaded when one is run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hlo_tools.chips import gpu_chip
from hlo_tools.errors import UnsupportedError
from hlo_tools.targets import Target
from pallas_kernels.attention import gpu_presets
from pallas_kernels.attention import hopper_attention as work
from pallas_kernels.attention.hopper_model import (
    MOST_REGISTERS,
    WARPGROUP_ROWS,
    add_predictions,
    default_constants,
)
from pallas_kernels.attention.problem import AttentionProblem
from pallas_kernels.kernel import KernelConfig, KernelFamily, Prediction

HOPPER = ("h100", "h100-pcie", "h200")
DTYPES = ("bfloat16", "float16")
WARPGROUPS = (2, 3)
KEY_BLOCKS = (64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)
QUERY_BLOCKS = (64, 80, 96, 112, 128)
STAGES = (2, 3, 4)
MOST_DEPTH = 256
CONSTANTS = default_constants()


@dataclass(frozen=True)
class ForwardConfig(KernelConfig):
    """The choices of the forward kernel.

    Attributes:
      block_q: queries of a CTA, 64 of each compute warpgroup.
      block_kv: keys of a tile.
      stages: tiles of keys and values in flight.
      compute_warpgroups: beside the one that loads.
    """

    block_q: int
    block_kv: int
    stages: int
    compute_warpgroups: int


@dataclass(frozen=True)
class BackwardConfig(KernelConfig):
    """The choices of the backward kernel that makes dq, dk and dv in one pass.

    Attributes:
      block_q: queries of a tile.
      block_kv: keys of a CTA, 64 of each compute warpgroup.
      stages: tiles of queries in flight.
      compute_warpgroups: beside the one that loads.
    """

    block_q: int
    block_kv: int
    stages: int
    compute_warpgroups: int


@dataclass(frozen=True)
class TwoKernelConfig(KernelConfig):
    """The choices of the backward pass as two kernels, one for dk and dv, one for dq.

    Attributes:
      block_q_dkv: queries of a tile, for dk and dv.
      block_kv_dkv: keys of a CTA, 64 of each compute warpgroup.
      block_q_dq: queries of a CTA, 64 of each compute warpgroup, for dq.
      block_kv_dq: keys of a tile.
      stages: tiles in flight, in both.
      compute_warpgroups: beside the one that loads, in both.
    """

    block_q_dkv: int
    block_kv_dkv: int
    block_q_dq: int
    block_kv_dq: int
    stages: int
    compute_warpgroups: int


def refuse_problem(problem: AttentionProblem, target: Target) -> str | None:
    """Returns why no configuration can run a problem, or None."""
    if target.spec.name not in HOPPER:
        return f"the kernels are for Hopper GPUs, not {target.spec.name}"
    if problem.dtype not in DTYPES:
        return f"operands are {problem.dtype}, not one of {', '.join(DTYPES)}"
    for name in ("head_dim", "value_dim"):
        dim = getattr(problem, name)
        if dim % 8 or not 0 < dim <= MOST_DEPTH:
            return f"{name} {dim} is no multiple of 8 up to {MOST_DEPTH}"
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
        for warpgroups in WARPGROUPS:
            for block_kv in KEY_BLOCKS:
                yield ForwardConfig(
                    WARPGROUP_ROWS * warpgroups, block_kv, stages, warpgroups
                )


def _refuse_forward(
    problem: AttentionProblem, config: ForwardConfig, target: Target
) -> str | None:
    reason = refuse_problem(problem, target) or _refuse_pipeline(
        config, config.block_q, config.block_kv, 256
    )
    if reason is not None:
        return reason
    smem = work.forward_smem(problem, config.block_q, config.block_kv, config.stages)
    registers = work.forward_registers(problem, WARPGROUP_ROWS, config.block_kv)
    return _refuse_sizes(target, smem, registers, config.compute_warpgroups)


def _refuse_pipeline(config: Any, owned: int, tile: int, most: int) -> str | None:
    """Sizes that the kernels' layout has no place for."""
    warpgroups = config.compute_warpgroups
    if warpgroups not in WARPGROUPS:
        return f"compute_warpgroups is none of {WARPGROUPS}"
    if owned != WARPGROUP_ROWS * warpgroups:
        return f"a CTA has {WARPGROUP_ROWS} rows for each compute warpgroup"
    if tile % 16 or not 16 <= tile <= most:
        return f"a tile has a multiple of 16 columns up to {most}"
    return None if config.stages >= 2 else "at least two stages"


def _predict_forward(
    problem: AttentionProblem, config: ForwardConfig, target: Target
) -> Prediction:
    return work.forward_prediction(
        problem, config.block_q, config.block_kv, config.stages,
        config.compute_warpgroups, target, CONSTANTS,
    )  # fmt: skip


def _backward_space(
    problem: AttentionProblem, target: Target
) -> Iterator[BackwardConfig]:
    for stages in STAGES:
        for warpgroups in WARPGROUPS:
            for block_q in QUERY_BLOCKS:
                yield BackwardConfig(
                    block_q, WARPGROUP_ROWS * warpgroups, stages, warpgroups
                )


def _refuse_backward(
    problem: AttentionProblem, config: BackwardConfig, target: Target
) -> str | None:
    reason = refuse_problem(problem, target) or _refuse_pipeline(
        config, config.block_kv, config.block_q, 128
    )
    if reason is not None:
        return reason
    blocks = config.block_q, config.block_kv
    smem = work.dkv_smem(problem, *blocks, config.stages, has_dq=True)
    registers = work.backward_registers(
        problem, *blocks, config.compute_warpgroups, ("dk", "dv", "dq part")
    )
    return _refuse_sizes(target, smem, registers, config.compute_warpgroups)


def _predict_backward(
    problem: AttentionProblem, config: BackwardConfig, target: Target
) -> Prediction:
    kernel = work.dkv_prediction(
        problem, config.block_q, config.block_kv, config.stages,
        config.compute_warpgroups, target, CONSTANTS, has_dq=True,
    )  # fmt: skip
    return add_predictions(
        kernel,
        work.delta_prediction(problem, target, CONSTANTS),
        work.dq_traffic_prediction(problem, target, CONSTANTS),
        work.group_prediction(problem, target, CONSTANTS),
    )


def _two_kernel_space(
    problem: AttentionProblem, target: Target
) -> Iterator[TwoKernelConfig]:
    for stages in STAGES:
        for warpgroups in WARPGROUPS:
            owned = WARPGROUP_ROWS * warpgroups
            for block_q in QUERY_BLOCKS:
                for block_kv in QUERY_BLOCKS:
                    yield TwoKernelConfig(
                        block_q, owned, owned, block_kv, stages, warpgroups
                    )


def _refuse_two_kernels(
    problem: AttentionProblem, config: TwoKernelConfig, target: Target
) -> str | None:
    dkv = config.block_q_dkv, config.block_kv_dkv
    dq = config.block_q_dq, config.block_kv_dq
    reason = (
        refuse_problem(problem, target)
        or _refuse_pipeline(config, dkv[1], dkv[0], 128)
        or _refuse_pipeline(config, dq[0], dq[1], 128)
    )
    if reason is not None:
        return reason
    warpgroups = config.compute_warpgroups
    smem = max(
        work.dkv_smem(problem, *dkv, config.stages, has_dq=False),
        work.dq_smem(problem, *dq, config.stages),
    )
    registers = max(
        work.backward_registers(problem, *dkv, warpgroups, ("dk", "dv")),
        work.backward_registers(problem, *dq, warpgroups, ("dq",)),
    )
    return _refuse_sizes(target, smem, registers, warpgroups)


def _predict_two_kernels(
    problem: AttentionProblem, config: TwoKernelConfig, target: Target
) -> Prediction:
    shared = config.stages, config.compute_warpgroups, target, CONSTANTS
    return add_predictions(
        work.dkv_prediction(
            problem, config.block_q_dkv, config.block_kv_dkv, *shared, has_dq=False
        ),
        work.dq_prediction(problem, config.block_q_dq, config.block_kv_dq, *shared),
        work.delta_prediction(problem, target, CONSTANTS),
        work.group_prediction(problem, target, CONSTANTS),
    )


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
BACKWARD_TWO_KERNELS = KernelFamily(
    name="attention-backward-two-kernels",
    problem_class=AttentionProblem,
    config_class=TwoKernelConfig,
    space=_two_kernel_space,
    refuse=_refuse_two_kernels,
    predict=_predict_two_kernels,
    make_inputs=gpu_presets.backward_inputs,
    run=_runner("gpu_backward_two_kernels", "flash_backward"),
    presets=gpu_presets.PRESETS,
)
