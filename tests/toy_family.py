"""A kernel family small enough to know its answers by hand."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.kernel import KernelConfig, KernelFamily, Prediction, Term


@dataclass(frozen=True)
class ToyProblem:
    """A sum of `length` numbers."""

    length: int
    shape: tuple[int, ...] | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class ToyConfig(KernelConfig):
    block: int
    unroll: int = 1
    fast: bool = False


def _space(problem, target):
    yield from (ToyConfig(b, u) for b in (4, 8, 16, 32) for u in (1, 2))


def _refuse(problem, config, target):
    if config.block > 16:
        return "over 16 numbers do not fit"
    return "unrolled past the end" if config.unroll > problem.length else None


def _predict(problem, config, target):
    blocks = -(-problem.length // config.block)
    work = 1e-6 * blocks * (1 + config.block / 4)
    return Prediction(
        (
            Term("adds", work, work),
            Term("reads", work / 2, 0.0),
            Term("launch", 1e-6, 1e-6),
        ),
        {"blocks": blocks},
    )


def _make_inputs(problem, seed):
    return (jax.random.normal(jax.random.key(seed), (problem.length,)),)


def _run(problem, config):
    def total(x):
        if config.unroll == 2:
            raise ValueError("no unrolling\nin this version")
        return jnp.sum(x) * problem.scale

    return total


TOY = KernelFamily(
    name="toy",
    problem_class=ToyProblem,
    config_class=ToyConfig,
    space=_space,
    refuse=_refuse,
    predict=_predict,
    make_inputs=_make_inputs,
    run=_run,
    presets={"small": lambda: (ToyProblem(16), ToyProblem(64))},
)
