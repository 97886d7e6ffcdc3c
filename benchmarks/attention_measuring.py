"""Programs of benchmarks/attention.py: compiled ahead, checked, and timed in turns."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from attention_contenders import CONTENDERS
from attention_exact import errors, limit
from attention_rows import Arrays, Row, arrays, shapes

from hlo_tools.errors import UnsupportedError
from pallas_kernels.timing import Timing, time_compiled

PARTS = ("forward", "both")
# What says that an implementation does not do this, rather than that it broke.
REFUSALS = (UnsupportedError, NotImplementedError)


@dataclass
class Cell:
    """What became of one implementation in one row and part.

    Attributes:
      status: "measured", "wrong", "refused" (it says that it can not), "skipped"
        (not tried), "failed" (ours broke) or "error" (another one did).
      reason: why, unless it was measured.
      errors: result -> the largest relative error of a block.
      milliseconds: of a call, one figure a round.
      timer: "profiler" or "wall".
    """

    status: str = "measured"
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    milliseconds: list[float] = field(default_factory=list)
    timer: str = ""

    @property
    def median(self) -> float | None:
        """Milliseconds of a call, or None."""
        return statistics.median(self.milliseconds) if self.milliseconds else None

    def fail(self, name: str, error: Exception) -> None:
        """Notes what `name` raised."""
        first = (str(error).strip().splitlines() or [""])[0]
        self.reason = f"{type(error).__name__}: {first}"[:300]
        if isinstance(error, UnsupportedError):  # its reasons are in the other lines
            self.reason = " ".join(str(error).split())[:300]
        if isinstance(error, REFUSALS):
            self.status = "refused"
        else:
            self.status = "failed" if CONTENDERS[name].ours else "error"
        self.milliseconds = []


@dataclass
class Programs:
    """What a row runs, as futures of compiled programs.

    Attributes:
      make: seed -> arrays.
      cells: implementation -> part -> what becomes of it.
      runs: (implementation, part) -> arrays -> results, for those that are tried.
      checks: part -> (arrays, results, kv_head) -> errors.
    """

    make: Future[Any]
    cells: dict[str, dict[str, Cell]]
    runs: dict[tuple[str, str], Future[Any]]
    checks: dict[str, Future[Any]]

    def wait(self) -> None:
        """Waits for all; errors are kept for `measure_row`."""
        for future in (self.make, *self.runs.values(), *self.checks.values()):
            future.exception()


def compile_row(row: Row, names: dict[str, str | None], pool: Executor) -> Programs:
    """Starts to compile all programs of a row.

    Args:
      row: the case.
      names: implementation -> why it can not be had, or None.
      pool: compiles.
    """
    given = shapes(row)
    head = jax.ShapeDtypeStruct((), "int32")

    def start(function: Callable[..., Any], *inputs: Any) -> Future[Any]:
        return pool.submit(lambda: jax.jit(function).lower(*inputs).compile())

    return Programs(
        make=start(lambda seed: arrays(row, seed), jax.ShapeDtypeStruct((), "uint32")),
        cells={
            name: {part: Cell("skipped" if why else "measured", why or "")
                   for part in PARTS}
            for name, why in names.items()
        },
        runs={
            (name, part): start(program(row, name, part), given)
            for name, why in names.items() if why is None for part in PARTS
        },
        checks={
            part: start(lambda *x: errors(row, *x), given, results(row, part), head)
            for part in PARTS
        },
    )  # fmt: skip


def program(row: Row, name: str, part: str) -> Callable[[Arrays], Arrays]:
    """Returns arrays -> results: "out", and if `part` is "both" "dq" and so on."""
    call = CONTENDERS[name].call

    def forward(given: Arrays) -> Arrays:
        return {"out": call(row, given)}

    def both(given: Arrays) -> Arrays:
        wanted = {key: given[key] for key in row.differentiable}
        out, vjp = jax.vjp(lambda some: call(row, given | some), wanted)
        (gradients,) = vjp(given["dout"])
        return {"out": out} | {f"d{key}": x for key, x in gradients.items()}

    return forward if part == "forward" else both


def results(row: Row, part: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of what `program` returns."""
    given = shapes(row)
    found = {"out": given["q"]}
    if part == "both":
        found |= {f"d{key}": given[key] for key in row.differentiable}
    return found


def measure_row(
    row: Row, programs: Programs, seed: int, rounds: int, seconds: float
) -> dict[str, dict[str, Cell]]:
    """Checks and times everything of a row.

    Args:
      row: the case.
      programs: from `compile_row`.
      seed: of the inputs.
      rounds: how often each gets its turn.
      seconds: how long about a turn takes.
    """
    make = programs.make.result()
    check_inputs, inputs = (make(jnp.uint32(seed + n)) for n in range(2))
    for part in PARTS:
        check = programs.checks[part].result()
        right = {}
        for name, by_part in programs.cells.items():
            future = programs.runs.get((name, part))
            if future is None:
                continue
            cell = by_part[part]
            try:
                run = future.result()
                cell.reason = too_large(run)
                if cell.reason:
                    cell.status = "skipped"
                    continue
                judge(row, cell, check, check_inputs, run(check_inputs))
            except Exception as error:  # compilers and kernels raise what they like
                cell.fail(name, error)
            if cell.status == "measured":
                right[name] = run
        time_in_turns(right, programs.cells, part, inputs, rounds, seconds)
    return programs.cells


def too_large(run: Any) -> str:
    """Returns why a compiled program does not fit into the memory, or ""."""
    needs = run.memory_analysis()
    if needs is None:
        return ""
    size = needs.temp_size_in_bytes + needs.argument_size_in_bytes
    size += needs.output_size_in_bytes
    there = memory_bytes()
    if size <= there:
        return ""
    return f"needs {size / 2**30:.1f} GiB of memory, of {there / 2**30:.1f}"


def memory_bytes() -> int:
    """Returns how much memory programs may take, in bytes."""
    found = jax.devices()[0].memory_stats()
    if found and "bytes_limit" in found:
        return found["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def judge(row: Row, cell: Cell, check: Any, given: Arrays, found: Arrays) -> None:
    """Compares results, of the first and the last key-value head, with exact ones."""
    for kv_head in sorted({0, row.kv_heads - 1}):
        for name, error in check(given, found, jnp.int32(kv_head)).items():
            # max() would lose a NaN
            worst = [cell.errors.get(name, 0.0), float(error)]
            cell.errors[name] = float(jnp.max(jnp.asarray(worst)))
    wrong = [
        f"{name} is off by {error:.1e}, at most {limit(row, name):.1e}"
        for name, error in cell.errors.items()
        if not error <= limit(row, name)
    ]
    if wrong:
        cell.status, cell.reason = "wrong", "; ".join(wrong)


def time_in_turns(
    runs: dict[str, Any],
    cells: dict[str, dict[str, Cell]],
    part: str,
    given: Arrays,
    rounds: int,
    seconds: float,
) -> None:
    """Times programs, one after the other, round by round."""
    for _ in range(rounds):
        for name, run in list(runs.items()):
            cell = cells[name][part]
            try:
                timing: Timing = time_compiled(run, given, seconds=seconds)
            except Exception as error:  # out of memory, for instance
                cell.fail(name, error)
                del runs[name]
                continue
            cell.milliseconds.append(timing.seconds * 1e3)
            if cell.timer not in ("", timing.timer):
                cell.status, cell.milliseconds = "failed", []
                cell.reason = "device and wall times mixed"
                del runs[name]
            cell.timer = timing.timer
