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
from hlo_tools.stage_compile import AS_WRITTEN
from hlo_tools.testing_arguments import Call, as_array, is_float, is_key
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
      largest_error: over all leaves, as a part of the leaf's largest magnitude. Of a
        leaf that was held against float32 it is scaled so that what is allowed there
        is the tolerance: rounding is all there is to a result that should be zero.
    """

    report: RewriteReport
    gradient_report: RewriteReport | None
    largest_error: float


def assert_equivalent(
    f: Callable,
    *args: Any,
    tolerance: float | None = None,
    grad: bool | int | str | Sequence[int | str] = False,
    passes: str = "default",
    exactness: str = "reassociating",
    min_bound: int = 0,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    allow_fallback: bool = False,
    **kwargs: Any,
) -> Equivalence:
    """Asserts that a function computes the same under `jax.jit` and `hlo_tools.jit`.

    Every leaf of the result is compared, NaN with NaN, by the tolerance of the
    narrowest float type in the program (`hlo_tools.verify.TOLERANCES`). A program with
    bfloat16 or float16 is also run in float32: a leaf may then be at most twice as far
    from that as it is under `jax.jit`, and one rounding more.

    Args:
      f: the function; one that is decorated is compared with what it decorates.
      args: its arguments, pytrees. Their arrays and numbers are traced; all else, such
        as text and functions, is handed on as it is.
      tolerance: instead of the table's, as a part of a leaf's largest magnitude. The
        two programs are then compared with each other alone.
      grad: compare also a program of results and gradients, those of the float leaves
        of the result weighted with fixed random numbers. True: with respect to every
        float input; else positions of arguments, as for `jax.grad`, or names.
      passes, exactness: as for `hlo_tools.jit`.
      min_bound: least number of sites that are bound, in each of the programs.
      static_argnums, static_argnames: arguments whose numbers and arrays are handed on
        as they are, as for `jax.jit`.
      allow_fallback: accept that the stage, or one site, failed, or that the stage is
        switched off: nothing, or less, is compared then.
      kwargs: keyword arguments of `f`.

    Returns:
      The reports, for further assertions.

    Raises:
      AssertionError: a leaf differs, too little is bound, or the stage failed. The
        message names the leaf, the error and the tolerance, or the reason.
      TypeError: `grad` names no argument, or a number has to be static.
      ValueError: `tolerance` is negative or no number, or `grad` means no float.
    """
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise ValueError(f"tolerance={tolerance}: expected a number of at least 0")
    call = Call(f, args, kwargs, static_argnums, static_argnames)
    wanted = {} if grad is False else call.differentiable(grad)

    def value(*flat):
        return {"result": call.function(*flat)}

    value.__name__ = call.function.__name__

    def compared(function: Callable, leaves: Sequence[Any]):
        staged = stage.jit(function, passes=passes, exactness=exactness)
        report, error = _compare(function, staged, leaves, tolerance, min_bound)
        if not allow_fallback and (reason := _fallback(report)):
            raise AssertionError(f"{function.__name__}: {reason}\n{report}")
        return report, error

    try:
        report, error = compared(value, call.leaves)
        if not wanted:
            return Equivalence(report, None, error)
        gradient, weights = _gradient_of(value, call.leaves, wanted)
        found, other = compared(gradient, [*call.leaves, *weights])
    except (TypeError, ValueError, IndexError) as failure:
        explained = call.explained(failure)
        if explained is failure:
            raise
        raise explained from failure
    return Equivalence(report, found, max(error, other))


def _fallback(report: RewriteReport) -> str:
    """Why a program, or a site of it, is not what the stage was asked for; or ""."""
    for note in report.notes:
        if AS_WRITTEN in note or note.startswith("plain jax.jit"):
            return f"nothing was compared: {note}"
    for site in report.with_status("failed"):
        return f"{site.id} failed: {site.reason}"
    return ""


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
        one = as_array(jax.tree.leaves(got)[number])
        reference = Reference(
            [], [as_array(want)], None if exact is None else [exact[number]]
        )
        what = path[0].key
        allowed = tolerance
        if allowed is None:
            platform = jax.default_backend()
            allowed = program_tolerance(text, platform, gradient=what == "gradient")
        if is_key(want):
            allowed = 0.0
        judged = reference.judge([one], allowed)
        scale = allowed / judged.tolerance if judged.tolerance else 1.0
        errors.append(judged.max_error * scale)
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
        inputs = cast_to(argument_types(wide), [as_array(leaf) for leaf in leaves])
        return run_text(wide, inputs, jax.default_backend())
    except Exception:  # it looks at bits, or runs on several devices
        return None


def _gradient_of(
    value: Callable, leaves: Sequence[Any], wanted: dict[int, str]
) -> tuple[Callable, list[np.ndarray]]:
    """The gradients of a random mixture of a function's results.

    Returns:
      A function of the leaves and the weights, as `_compare` takes it; the weights.
    """
    shapes = [
        one for one in jax.tree.leaves(jax.eval_shape(value, *leaves)) if is_float(one)
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
            floats = [one for one in jax.tree.leaves(results) if is_float(one)]
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
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> RewriteReport:
    """Times a function under `jax.jit` and under `hlo_tools.jit`, in turn.

    Args:
      f: the function; one that is decorated is compared with what it decorates.
      args, kwargs: its arguments, arrays or pytrees of them.
      rounds: how often each is run, after one run that does not count.
      passes, exactness: as for `hlo_tools.jit`.
      static_argnums, static_argnames: as for `assert_equivalent`.

    Returns:
      The report, with the medians in `measured`.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: expected at least 1")
    call = Call(f, args, kwargs, static_argnums, static_argnames)
    value = call.function
    leaves = [
        jnp.asarray(leaf) for leaf in call.leaves
    ]  # on the device once and for all
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
