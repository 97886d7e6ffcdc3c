"""For tests of one's own: is a function the same under `hlo_tools.jit`, and faster?"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlo_tools import stage
from hlo_tools.report import RewriteReport, VerifyResult
from hlo_tools.testing_golden import UPDATE_VARIABLE, assert_golden, normalized
from hlo_tools.verify import run_text
from hlo_tools.verify_program import (
    Reference,
    argument_types,
    cast_to,
    program_tolerance,
    widened,
)

__all__ = [
    "UPDATE_VARIABLE",
    "Equivalence",
    "assert_equivalent",
    "assert_golden",
    "measure_gain",
    "normalized",
]


@dataclass(frozen=True)
class Equivalence:
    """What `assert_equivalent` saw.

    Attributes:
      report: of the function's own program.
      gradient_report: of the program of its results and gradients; None without
        `grad`.
      largest_error: over all leaves, as a part of the leaf's largest magnitude.
    """

    report: RewriteReport
    gradient_report: RewriteReport | None
    largest_error: float


def assert_equivalent(
    f: Callable,
    *args: Any,
    tolerance: float | None = None,
    grad: bool | int | Sequence[int] = False,
    passes: str = "default",
    exactness: str = "reassociating",
    min_bound: int = 0,
    **kwargs: Any,
) -> Equivalence:
    """Asserts that a function computes the same under `jax.jit` and `hlo_tools.jit`.

    Every leaf of the result is compared, NaN with NaN, by the tolerance of the
    narrowest float type in the program (`hlo_tools.verify.TOLERANCES`). A program with
    bfloat16 or float16 is also run in float32: a leaf may then be at most twice as far
    from that as it is under `jax.jit`, and one rounding more.

    Args:
      f: the function; one that is decorated is compared with what it decorates.
      args: its arguments, arrays or pytrees of them.
      tolerance: instead of the table's, as a part of a leaf's largest magnitude. The
        two programs are then compared with each other alone.
      grad: compare also a program of results and gradients, those of the float leaves
        of the result weighted with fixed random numbers. True: with respect to every
        float input; else the positions of arguments, as for `jax.grad`.
      passes, exactness: as for `hlo_tools.jit`.
      min_bound: least number of sites that are bound, in each of the programs.
      kwargs: keyword arguments of `f`.

    Returns:
      The reports, for further assertions.

    Raises:
      AssertionError: a leaf differs, or too little is bound. The message names the
        leaf, the error and the tolerance.
    """
    function = getattr(f, "__wrapped__", f) if hasattr(f, "reports") else f
    leaves, structure = jax.tree.flatten((args, kwargs))

    def value(*flat):
        positional, named = jax.tree.unflatten(structure, flat)
        return {"result": function(*positional, **named)}

    value.__name__ = getattr(function, "__name__", "value")

    def staged(one: Callable) -> Any:
        return stage.jit(one, passes=passes, exactness=exactness)

    report, error = _compare(value, staged(value), leaves, tolerance, min_bound)
    if grad is False:
        return Equivalence(report, None, error)
    wanted = _differentiable(args, kwargs, grad)
    gradient, weights = _gradient_of(value, leaves, wanted)
    found, other = _compare(
        gradient, staged(gradient), [*leaves, *weights], tolerance, min_bound
    )
    return Equivalence(report, found, max(error, other))


def _compare(
    function: Callable,
    staged: Any,
    leaves: Sequence[Any],
    tolerance: float | None,
    min_bound: int,
) -> tuple[RewriteReport, float]:
    """Runs a function both ways; the report and the largest error.

    Its result is a dict of "result" and "gradient", which go by different tolerances.
    """
    baseline, text = _plain(function, leaves)
    named, structure = jax.tree_util.tree_flatten_with_path(baseline(*leaves))
    got = staged(*leaves)
    assert jax.tree.structure(got) == structure
    exact = None if tolerance is not None else _in_float32(text, leaves)
    report, errors = staged.report(), [0.0]
    for number, (path, want) in enumerate(named):
        one = np.asarray(jax.tree.leaves(got)[number])
        reference = Reference(
            [], [np.asarray(want)], None if exact is None else [exact[number]]
        )
        what = path[0].key
        allowed = tolerance
        if allowed is None:
            platform = jax.default_backend()
            allowed = program_tolerance(text, platform, gradient=what == "gradient")
        judged = reference.judge([one], allowed)
        errors.append(judged.max_error)
        if not judged.passed:
            leaf = f"{what}{jax.tree_util.keystr(path[1:])}"
            raise AssertionError(_difference(function.__name__, leaf, judged, report))
    bound = len(report.with_status("bound"))
    if bound < min_bound:
        raise AssertionError(
            f"{function.__name__}: {bound} sites are bound, expected at least "
            f"{min_bound}\n{report}"
        )
    return report, max(errors)


def _difference(
    name: str, leaf: str, judged: VerifyResult, report: RewriteReport
) -> str:
    detail = f" ({judged.detail})" * bool(judged.detail)
    return (
        f"{name}: {leaf} differs under hlo_tools.jit: error {judged.max_error:.3g} of "
        f"its largest magnitude, tolerance {judged.tolerance:.3g}{detail}\n"
        f"{report.summary_line()}\n"
        "find the pass and the site with: hlo-tools bisect SCRIPT, where SCRIPT runs "
        "this function"
    )


def _plain(function: Callable, leaves: Sequence[Any]) -> tuple[Any, str]:
    """A function as JAX alone compiles it, and the text of its program.

    Whatever treats it otherwise, such as `hlo-tools run` or a decorated function
    inside, is switched off for the compile.
    """

    def plain(*flat):  # not the same object: it shares no trace with the staged one
        return function(*flat)

    plain.__name__ = function.__name__
    with _stage_off():
        lowered = jax.jit(plain, keep_unused=True).lower(*leaves)
        return lowered.compile(), lowered.as_text()


@contextlib.contextmanager
def _stage_off() -> Iterator[None]:
    before = os.environ.get("HLO_TOOLS")
    os.environ["HLO_TOOLS"] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HLO_TOOLS"]
        else:
            os.environ["HLO_TOOLS"] = before


def _in_float32(text: str, leaves: Sequence[Any]) -> list[np.ndarray] | None:
    """What a low-precision program gives in float32; None where that can not be had."""
    wide = widened(text)
    if wide is None:
        return None
    try:
        inputs = cast_to(argument_types(wide), leaves)
        return run_text(wide, inputs, jax.default_backend())
    except Exception:  # it looks at bits, or runs on several devices
        return None


def _differentiable(
    args: tuple, kwargs: dict[str, Any], grad: bool | int | Sequence[int]
) -> dict[int, str]:
    """The leaves to differentiate by: place among all leaves -> name."""
    numbers = range(len(args)) if grad is True else np.atleast_1d(np.asarray(grad))
    positions = {int(number) % max(len(args), 1) for number in numbers}
    found = {}
    named = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    for place, (path, leaf) in enumerate(named):
        in_kwargs = path[0].idx == 1
        if in_kwargs and grad is not True:
            continue
        if not in_kwargs and path[1].idx not in positions:
            continue
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            name = "kwargs" if in_kwargs else "args"
            found[place] = name + jax.tree_util.keystr(path[1:])
    if not found:
        raise ValueError(f"grad={grad!r}: none of these inputs is a float")
    return found


def _gradient_of(
    value: Callable, leaves: Sequence[Any], wanted: dict[int, str]
) -> tuple[Callable, list[np.ndarray]]:
    """The gradients of a random mixture of a function's results.

    Returns:
      A function of the leaves and the weights, as `_compare` takes it; the weights.
    """
    shapes = [
        one
        for one in jax.tree.leaves(jax.eval_shape(value, *leaves))
        if jnp.issubdtype(one.dtype, jnp.floating)
    ]
    if not shapes:
        raise ValueError("grad: no result is a float")
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(x.shape).astype(x.dtype) for x in shapes]

    def gradient(*inputs):
        flat, factors = list(inputs[: len(leaves)]), inputs[len(leaves) :]

        def mixture(chosen):
            for place, array in zip(wanted, chosen, strict=True):
                flat[place] = array
            results = value(*flat)["result"]
            floats = [
                one
                for one in map(jnp.asarray, jax.tree.leaves(results))
                if jnp.issubdtype(one.dtype, jnp.floating)
            ]
            pairs = zip(floats, factors, strict=True)
            return sum(jnp.sum((a * b).astype(jnp.float32)) for a, b in pairs), results

        chosen = [jnp.asarray(inputs[place]) for place in wanted]
        found, results = jax.grad(mixture, has_aux=True)(chosen)
        named = dict(zip(wanted.values(), found, strict=True))
        return {"gradient": named, "result": results}

    gradient.__name__ = f"{value.__name__}_gradient"
    return gradient, weights


def measure_gain(
    f: Callable,
    *args: Any,
    rounds: int = 20,
    passes: str = "default",
    exactness: str = "reassociating",
    **kwargs: Any,
) -> RewriteReport:
    """Times a function under `jax.jit` and under `hlo_tools.jit`, in turn.

    Args:
      f: the function; one that is decorated is compared with what it decorates.
      args, kwargs: its arguments, arrays or pytrees of them.
      rounds: how often each is run, after one run that does not count.
      passes, exactness: as for `hlo_tools.jit`.

    Returns:
      The report, with the medians in `measured`.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: expected at least 1")
    function = getattr(f, "__wrapped__", f) if hasattr(f, "reports") else f
    leaves, structure = jax.tree.flatten((args, kwargs))
    leaves = [jnp.asarray(leaf) for leaf in leaves]  # on the device once and for all

    def value(*flat):
        positional, named = jax.tree.unflatten(structure, flat)
        return function(*positional, **named)

    value.__name__ = getattr(function, "__name__", "value")
    baseline, _ = _plain(value, leaves)
    staged = stage.jit(value, passes=passes, exactness=exactness)
    runs = (baseline, staged.lower(*leaves).compile())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for run, seconds in zip(runs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run(*leaves))
            seconds.append(time.perf_counter() - start)
    before, after = (statistics.median(seconds[1:]) for seconds in times)
    report = staged.report()
    report.measured = {"baseline_seconds": before, "seconds": after}
    return report
