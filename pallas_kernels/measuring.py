"""Measures every configuration of a kernel family that can run, for some problems."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hlo_tools.targets import Target
from pallas_kernels.kernel import KernelConfig, KernelFamily
from pallas_kernels.measured import Entry, MeasuredTable, Sample, load_table
from pallas_kernels.timing import Timing, time_call

# Told before each configuration: (done, of how many, what is next).
Tell = Callable[[int, int, str], None]


def measure(
    family: KernelFamily,
    problem: Any,
    target: Target,
    tell: Callable[[str], None] = lambda what: None,
    timer: Callable[..., Timing] = time_call,
) -> tuple[Entry | None, list[str]]:
    """Runs every candidate of a problem on the device at hand.

    A configuration that fails is a sample with its error, not the end.

    Args:
      family: the kernel.
      problem: what to compute.
      target: the device at hand.
      tell: is told of each configuration before it runs.
      timer: (function, *arrays) -> Timing.

    Returns:
      What was measured, or None if nothing ran or the times can not be compared; and
      what went wrong or is uncertain, a line each.
    """
    configs = family.candidates(problem, target)
    tried = []
    if configs:
        arrays = family.make_inputs(problem, 0)
        for config in configs:
            tell(str(config))
            tried.append(try_config(family, problem, config, arrays, timer))
    return entry_of(family, problem, tried)


# A configuration that was tried, and how it was timed if it ran.
Tried = tuple[Sample, Timing | None]


def entry_of(
    family: KernelFamily, problem: Any, tried: Sequence[Tried]
) -> tuple[Entry | None, list[str]]:
    """Returns what `measure` returns, of all its candidates."""
    key = family.key(problem)
    if not tried:
        return None, [f"no configuration can run {key}"]
    samples = tuple(sample for sample, _ in tried)
    timings = [timing for _, timing in tried if timing is not None]
    notes = list(dict.fromkeys(timing.note for timing in timings if timing.note))
    timers = {timing.timer for timing in timings}
    if len(timers) > 1:
        return None, [*notes, f"device and wall times mixed, not kept: {key}"]
    if not timers:
        return None, [f"none ran for {key}: {samples[0].error}"]
    return Entry(samples, timers.pop()), notes


def tune(
    family: KernelFamily,
    problems: Sequence[Any],
    target: Target,
    path: Path,
    tell: Tell = lambda done, total, what: None,
    timer: Callable[..., Timing] = time_call,
    workers: int = 1,
) -> tuple[MeasuredTable, list[str]]:
    """Measures problems, and keeps each in the table's file as soon as it is done.

    Args:
      family: the kernel.
      problems: what to compute.
      target: the device at hand; its `device_kind` names the table.
      path: of the table; what is in it stays, save what is measured anew.
      tell: is told how far it is.
      timer: as `measure`.
      workers: processes that compile side by side; they take turns on the device, and
        `timer` is not used.

    Returns:
      The table of what was measured now; and what went wrong or is uncertain.

    Raises:
      MeasuredTableError: the file is there and is no table of this family and device.
    """
    today = datetime.date.today().isoformat()
    measured = MeasuredTable(family.name, target.device_kind, today, _versions())
    whole = load_table(path).merged(measured) if path.exists() else measured
    total = sum(len(family.candidates(problem, target)) for problem in problems)
    count = itertools.count()

    def told(what: str) -> None:
        tell(next(count), total, what)

    if workers > 1:
        found = measure_in_processes(family, problems, target, told, workers)
    else:
        found = ((x, *measure(family, x, target, told, timer)) for x in problems)
    notes: dict[str, None] = {}
    for problem, entry, lines in found:
        notes.update(dict.fromkeys(lines))
        if entry is not None:
            one = replace(measured, entries={family.key(problem): entry})
            measured, whole = measured.merged(one), whole.merged(one)
            whole.save(path)
    tell(total, total, "done")
    return measured, list(notes)


def measure_in_processes(
    family: KernelFamily,
    problems: Sequence[Any],
    target: Target,
    tell: Callable[[str], None],
    workers: int,
) -> Iterator[tuple[Any, Entry | None, list[str]]]:
    """Yields (problem, and what `measure` returns), as they get done."""
    from pallas_kernels.measuring_workers import try_all

    left = {x: len(family.candidates(x, target)) for x in problems}
    tried: dict[Any, list[Tried]] = {problem: [] for problem in problems}
    for problem in [x for x, count in left.items() if not count]:
        yield problem, *entry_of(family, problem, [])
    for problem, done in try_all(family, problems, target, workers):
        tell(str(done[0].config))
        tried[problem].append(done)
        left[problem] -= 1
        if not left[problem]:
            order = [x.to_dict() for x in family.candidates(problem, target)]
            tried[problem].sort(key=lambda x: order.index(x[0].config))
            yield problem, *entry_of(family, problem, tried.pop(problem))


def try_config(
    family: KernelFamily,
    problem: Any,
    config: KernelConfig,
    arrays: tuple[Any, ...],
    timer: Callable[..., Timing],
) -> Tried:
    """Runs one configuration."""
    try:
        timing = timer(family.run(problem, config), *arrays)
    except Exception as error:  # compilers raise what they like
        first = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"[:300]
        return Sample(config.to_dict(), error=reason), None
    return Sample(config.to_dict(), seconds=timing.seconds), timing


def _versions() -> dict[str, str]:
    found = {}
    for name in ("hlo-tools", "jax", "jaxlib", "jax-cuda13-plugin", "libtpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
