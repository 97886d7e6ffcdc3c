"""Measures every configuration of a kernel family that can run, for some problems."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
from collections.abc import Callable, Sequence
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
    key = family.key(problem)
    configs = family.candidates(problem, target)
    if not configs:
        return None, [f"no configuration can run {key}"]
    arrays = family.make_inputs(problem, 0)
    samples, timings = [], []
    for config in configs:
        tell(str(config))
        sample, timing = _sample(family, problem, config, arrays, timer)
        samples.append(sample)
        if timing is not None:
            timings.append(timing)
    notes = list(dict.fromkeys(timing.note for timing in timings if timing.note))
    timers = {timing.timer for timing in timings}
    if len(timers) > 1:
        return None, [*notes, f"device and wall times mixed, not kept: {key}"]
    if not timers:
        return None, [f"none ran for {key}: {samples[0].error}"]
    return Entry(tuple(samples), timers.pop()), notes


def tune(
    family: KernelFamily,
    problems: Sequence[Any],
    target: Target,
    path: Path,
    tell: Tell = lambda done, total, what: None,
    timer: Callable[..., Timing] = time_call,
) -> tuple[MeasuredTable, list[str]]:
    """Measures problems, and keeps each in the table's file as soon as it is done.

    Args:
      family: the kernel.
      problems: what to compute.
      target: the device at hand; its `device_kind` names the table.
      path: of the table; what is in it stays, save what is measured anew.
      tell: is told how far it is.
      timer: as `measure`.

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
    notes: dict[str, None] = {}
    for problem in problems:
        entry, found = measure(
            family, problem, target, lambda what: tell(next(count), total, what), timer
        )
        notes.update(dict.fromkeys(found))
        if entry is not None:
            one = replace(measured, entries={family.key(problem): entry})
            measured, whole = measured.merged(one), whole.merged(one)
            whole.save(path)
    tell(total, total, "done")
    return measured, list(notes)


def _sample(
    family: KernelFamily,
    problem: Any,
    config: KernelConfig,
    arrays: tuple[Any, ...],
    timer: Callable[..., Timing],
) -> tuple[Sample, Timing | None]:
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
