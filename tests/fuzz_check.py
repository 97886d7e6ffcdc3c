"""Runs a case's program as JAX made it and as the passes left it, and compares.

Most programs run in StableHLO's reference interpreter: tiny shapes take it
milliseconds, and it does nothing but what each operation is defined to do. The
others are compiled by XLA.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from fuzz_case import Case
from fuzz_inputs import widened
from fuzz_programs import build
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo

from hlo_tools import StableHloModule
from hlo_tools.driver import run_passes
from hlo_tools.targets import Target
from hlo_tools.verify import run_text

# Allowed beside twice the original's own error, as a part of the result's size.
SMALL = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 1.6e-2, "float16": 2e-3}
# The same as a part of the largest magnitude among all results: sums that cancel.
CANCELLED = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3}
# The interpreter aborts the process at an operation that it does not know.
DIALECTS = ("builtin", "func", "stablehlo")
FOREIGN = ("stablehlo.custom_call", "stablehlo.composite", "stablehlo.rng")


@dataclass
class Verdict:
    """What came of one case.

    Attributes:
      case: the case.
      wrong: what differs, or "" if nothing does.
      statuses: of the report's sites.
      reasons: of the sites that are not bound.
      error: largest error, as a part of what is allowed, where it was judged
        against float64; else 0.
      seconds: of the whole check.
      compiled: whether XLA ran it.
    """

    case: Case
    wrong: str = ""
    statuses: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    error: float = 0.0
    seconds: float = 0.0
    compiled: bool = False

    @property
    def bound(self) -> int:
        return self.statuses.count("bound")


def lowered(case: Case, wide: bool = False) -> tuple[str, list[np.ndarray]]:
    """Returns the program's StableHLO and its inputs, flat.

    Args:
      case: the case.
      wide: with float64 in the place of every float type.
    """
    function, arrays = build(case)
    x64 = wide or case.dtype == "float64"
    arrays = widened(arrays) if wide else arrays
    with jax.enable_x64(x64), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a fill that overflows
        text = jax.jit(function, keep_unused=True).lower(arrays).as_text()
    return text, [np.asarray(x) for x in jax.tree.leaves(arrays)]


def rewritten(text: str, passes: str = "default"):
    """Returns the text that the passes make, and their report."""
    module, report = run_passes(
        StableHloModule.parse(text), passes, Target.parse("cpu")
    )
    module.verify()
    return module.as_text(), report


# ---------------------------------------------------------------------- execution


def _attribute(array: np.ndarray) -> ir.Attribute:
    if array.dtype == np.bool_:
        values = "[" + ", ".join(str(bool(x)).lower() for x in array.ravel()) + "]"
        shape = "x".join([*map(str, array.shape), "i1"])
        flat = ir.Attribute.parse(f"dense<{values}> : tensor<{array.size}xi1>")
        if array.ndim == 1:
            return flat
        nested = str(array.tolist()).lower()
        return ir.Attribute.parse(f"dense<{nested}> : tensor<{shape}>")
    if array.dtype == jax.numpy.bfloat16:
        bits = np.array(array).view(np.uint16)
        return ir.DenseElementsAttr.get(bits, type=ir.BF16Type.get(), shape=array.shape)
    return ir.DenseElementsAttr.get(np.array(array, order="C"))


def _with_wide_results(text: str) -> str:
    """Wraps @main so that bfloat16 results leave as float32."""
    module = StableHloModule.parse(text)
    kind = ir.FunctionType(module.main.type)
    if not any("bf16" in str(t) for t in kind.results):
        return text
    inputs, results = [str(t) for t in kind.inputs], [str(t) for t in kind.results]
    wide = [t.replace("bf16", "f32") for t in results]
    names = ", ".join(f"%a{i}" for i in range(len(inputs)))
    arguments = ", ".join(f"%a{i}: {t}" for i, t in enumerate(inputs))
    types = f"({', '.join(inputs)}) -> ({', '.join(results)})"
    count = f":{len(results)}" if len(results) > 1 else ""
    lines = [f"%r{count} = func.call @inner({names}) : {types}"]
    for i, (old, new) in enumerate(zip(results, wide, strict=True)):
        value = f"%r#{i}" if count else "%r"
        lines.append(f"%w{i} = stablehlo.convert {value} : ({old}) -> {new}")
    outs = ", ".join(f"%w{i}" for i in range(len(wide)))
    lines.append(f"func.return {outs} : {', '.join(wide)}")
    wrapper = (
        f"func.func public @main({arguments}) -> ({', '.join(wide)}) {{\n"
        + "\n".join(lines)
        + "\n}\n"
    )
    text = text.replace("func.func public @main(", "func.func private @inner(", 1)
    head, _, tail = text.rstrip().rpartition("}")
    return f"{head}{wrapper}}}{tail}"


def interpret(text: str, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Runs a module in the reference interpreter.

    Raises:
      ValueError: the module has an operation that it may not know.
    """
    module = StableHloModule.parse(_with_wide_results(text)).module
    with module.context, ir.Location.unknown(module.context):
        pipeline = "builtin.module(func.func(chlo-legalize-to-stablehlo))"
        passmanager.PassManager.parse(pipeline).run(module.operation)
        for op in StableHloModule(module).walk():
            if op.name in FOREIGN or op.name.partition(".")[0] not in DIALECTS:
                raise ValueError(f"the interpreter may not know {op.name}")
        results = stablehlo.eval_module(module, [_attribute(x) for x in inputs])
        return [np.asarray(x) for x in results]


def execute(text: str, inputs: Sequence[np.ndarray], compiled: bool):
    """Runs a module: compiled by XLA, or interpreted where that is possible."""
    if not compiled:
        with contextlib.suppress(ValueError):
            return interpret(text, inputs)
    wide = any(x.dtype == np.float64 for x in inputs)
    with jax.enable_x64(wide):
        return run_text(text, inputs, "cpu")


# --------------------------------------------------------------------- comparison


def _float64(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(x).astype(np.float64) for x in arrays]


def _magnitude(arrays: Sequence[np.ndarray]) -> float:
    """Largest finite magnitude in all arrays."""
    sizes = [np.abs(x[np.isfinite(x)]).max(initial=0.0) for x in arrays]
    return max(sizes, default=0.0)


def _quickly_equal(got, want, dtype: str) -> bool:
    """Whether two runs agree so well that no reference is needed."""
    floor = CANCELLED[dtype] * _magnitude(want)
    for one, two in zip(got, want, strict=True):
        if not np.array_equal(np.isnan(one), np.isnan(two)):
            return False
        if not np.array_equal(one[np.isinf(one)], two[np.isinf(two)]):
            return False
        allowed = SMALL[dtype] * _magnitude([two]) + floor
        finite = np.isfinite(two)
        if np.any(np.abs(one[finite] - two[finite]) > allowed):
            return False
    return True


# Rounding of one operation in each type.
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-11}


def _sensitivity(
    case: Case, text: str, inputs, results, dtype: str
) -> list[np.ndarray]:
    """Returns how far each result moves when its inputs are rounded otherwise.

    A program of a narrow type can not tell its inputs from their neighbors, so no
    order of its operations is better than that. A result may jump: the slope of a
    magnitude, where a score is nearly 0; a score of a row whose keys all have -1e4
    added, which float32 knows to 1e-3.
    """
    moved = [np.zeros_like(x) for x in results]
    for seed in range(100):
        rng = np.random.default_rng((case.seed, seed))
        near = [
            (x * (1 + ROUNDING[dtype] * rng.choice([-1, 0, 1], x.shape))).astype(
                x.dtype
            )
            if jax.numpy.issubdtype(x.dtype, np.floating)
            else x
            for x in map(np.asarray, inputs)
        ]
        for number, one in enumerate(_float64(execute(text, near, False))):
            moved[number] = np.fmax(moved[number], np.abs(one - results[number]))
    return moved


def _judge(got, want, true, dtype: str, moved=None) -> tuple[str, float]:
    """Compares with float64 as the truth: at most twice the original's error.

    Args:
      got, want, true: results of the rewritten program, the original, and float64.
      dtype: of the program.
      moved: see `_sensitivity`; allowed on top, if given.

    Returns:
      What is wrong, or "", and the largest error as a part of what is allowed.
    """
    floor = CANCELLED[dtype] * _magnitude(true)
    worst = 0.0
    for i, (one, two, three) in enumerate(zip(got, want, true, strict=True)):
        # Where a narrow type overflowed in the original, the truth may be better.
        finite = np.isfinite(three)
        sound = finite & np.isfinite(two)
        if np.any(finite & ~np.isfinite(one) & np.isfinite(two)):
            return f"result {i}: not finite where the original is", np.inf
        if not np.array_equal(np.isnan(one[~finite]), np.isnan(two[~finite])):
            return f"result {i}: NaN in other places", np.inf
        if np.any(np.isfinite(one[finite]) & np.isnan(two[finite])):
            if dtype in ("float32", "float64"):
                return f"result {i}: a NaN of the original is gone", np.inf
        allowed = SMALL[dtype] * _magnitude([three]) + floor
        own = np.abs(two[sound] - three[sound]).max(initial=0.0)
        error = np.abs(one[sound] - three[sound]).max(initial=0.0)
        limit = 2 * own + allowed
        if moved is not None:
            limit += 2 * moved[i][sound].max(initial=0.0)
        share = error / limit if limit > 0 else float(error > 0)
        worst = max(worst, share)
        if error > limit:
            return (
                f"result {i}, shape {one.shape}: error {error:.3g}, the original's "
                f"{own:.3g}, magnitude {_magnitude([three]):.3g}"
            ), share
    return "", worst


def check(case: Case, passes: str = "default", compiled: bool | None = None) -> Verdict:
    """Rewrites a case's program and compares it with the original.

    Args:
      case: the case.
      passes: the pipeline.
      compiled: whether XLA runs both programs; None: one in 8 of those of
        narrow types, whose sums it rounds less often, and one in 48 of the rest.
    """
    start = time.perf_counter()
    if compiled is None:
        compiled = case.seed % (8 if case.narrow else 48) == 0
    verdict = Verdict(case, compiled=compiled)
    text, inputs = lowered(case)
    try:
        new, report = rewritten(text, passes)
    except Exception as error:  # a crash is a finding, whatever its type
        verdict.wrong = f"the passes raised {type(error).__name__}: {error}"
        verdict.seconds = time.perf_counter() - start
        return verdict
    verdict.statuses = [site.status for site in report.sites]
    verdict.reasons = [s.reason for s in report.sites if s.status != "bound"]
    want = _float64(execute(text, inputs, compiled))
    try:
        got = _float64(execute(new, inputs, compiled))
    except Exception as error:
        verdict.wrong = f"the result does not run: {type(error).__name__}: {error}"
        verdict.seconds = time.perf_counter() - start
        return verdict
    if not _quickly_equal(got, want, case.dtype):
        true = want
        if case.dtype != "float64":
            true_text, true_inputs = lowered(case, wide=True)
            true = _float64(execute(true_text, true_inputs, False))
        # a program is as exact as the narrowest type in it
        narrowest = case.dtype
        if (case.dtype, case.softmax_dtype) == ("float64", "float32"):
            narrowest = "float32"
        verdict.wrong, verdict.error = _judge(got, want, true, narrowest)
        if np.isfinite(verdict.error) and verdict.wrong and narrowest != "float64":
            moved = _sensitivity(case, text, inputs, want, narrowest)
            if case.dtype != "float64":
                wide = _sensitivity(case, true_text, true_inputs, true, narrowest)
                moved = [np.fmax(*pair) for pair in zip(wide, moved, strict=True)]
            judged = _judge(got, want, true, narrowest, moved)
            verdict.wrong, verdict.error = judged
    verdict.seconds = time.perf_counter() - start
    return verdict
