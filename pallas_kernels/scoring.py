"""How good the model's picks are, by measured times: predicted pick over best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hlo_tools.errors import MeasuredTableError
from hlo_tools.targets import Target
from pallas_kernels.kernel import KernelConfig, KernelFamily
from pallas_kernels.measured import MeasuredTable


@dataclass(frozen=True)
class Score:
    """One problem.

    Attributes:
      problem: what was computed.
      picked, best: the model's choice among the configurations tried, and the fastest.
      ratio: time of the pick over that of the fastest, at least 1; infinite if the
        pick did not run.
      rank: of the pick, by its measured time, from 1.
      tried: configurations that ran.
      predicted_over_measured: of the pick; None if it did not run.
    """

    problem: Any
    picked: KernelConfig
    best: KernelConfig
    ratio: float
    rank: int
    tried: int
    predicted_over_measured: float | None


@dataclass(frozen=True)
class Summary:
    """All problems of a table.

    Attributes:
      mean: geometric mean of the ratios.
      worst: the largest.
      exact: how many picks are the fastest.
      failed: how many did not run.
      problems: how many there are.
    """

    mean: float
    worst: float
    exact: int
    failed: int
    problems: int


def score(family: KernelFamily, table: MeasuredTable, target: Target) -> list[Score]:
    """Compares, for each problem of a table, the model's pick with the fastest.

    The model chooses among all configurations that were tried, those that failed
    included, and sees none of their times.

    Args:
      family: of the table.
      table: with all times, as `hlo-tools tune` writes it.
      target: what the model predicts for: the table's device.

    Raises:
      KernelConfigError: an entry is not of this family.
      MeasuredTableError: the table is another family's.
    """
    if table.family != family.name:
        raise MeasuredTableError(f"a table of {table.family}, not {family.name}")
    found = []
    for key, entry in table.entries.items():
        problem = family.problem_of(key)
        times = {
            family.config_class.from_dict(sample.config): sample.seconds
            for sample in entry.samples
        }
        predicted = {
            config: family.predict(problem, config, target).seconds for config in times
        }
        picked = min(times, key=lambda config: predicted[config])
        best = family.config_class.from_dict(entry.best.config)
        fastest, taken = times[best], times[picked]
        ran = [seconds for seconds in times.values() if seconds is not None]
        assert fastest is not None  # `Entry.best` ran
        found.append(
            Score(
                problem=problem,
                picked=picked,
                best=best,
                ratio=math.inf if taken is None else taken / fastest,
                rank=1 + sum(s < (math.inf if taken is None else taken) for s in ran),
                tried=len(ran),
                predicted_over_measured=None
                if taken is None
                else predicted[picked] / taken,
            )
        )
    return found


def summarize(scores: Sequence[Score]) -> Summary:
    """Returns the totals; picks that failed are not in the mean, but in `worst`.

    Raises:
      ValueError: there are no scores.
    """
    if not scores:
        raise ValueError("no scores")
    ratios = [one.ratio for one in scores]
    ran = [math.log(ratio) for ratio in ratios if math.isfinite(ratio)]
    return Summary(
        mean=math.exp(sum(ran) / len(ran)) if ran else math.inf,
        worst=max(ratios),
        exact=sum(one.ratio == 1 for one in scores),
        failed=len(ratios) - len(ran),
        problems=len(scores),
    )


def scores_dict(scores: Sequence[Score], key: Any) -> dict[str, Any]:
    """Returns scores and totals as plain values, for JSON.

    Args:
      scores: of `score`.
      key: `KernelFamily.key` of their family.
    """
    total = summarize(scores)
    return {
        "geometric_mean": _finite(total.mean),
        "worst": _finite(total.worst),
        "exact": total.exact,
        "failed": total.failed,
        "problems": total.problems,
        "rows": [
            {
                "problem": key(one.problem),
                "picked": one.picked.to_dict(),
                "best": one.best.to_dict(),
                "ratio": _finite(one.ratio),
                "rank": one.rank,
                "tried": one.tried,
                "predicted_over_measured": one.predicted_over_measured,
            }
            for one in scores
        ],
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def scores_text(scores: Sequence[Score], key: Any) -> str:
    """Returns scores and totals as a table, the worst first.

    Args:
      scores: of `score`.
      key: `KernelFamily.key` of their family.
    """
    lines = [f"{'ratio':>6}  {'rank':>7}  {'pred/meas':>9}  picked | fastest | problem"]
    for one in sorted(scores, key=lambda one: -one.ratio):
        near = one.predicted_over_measured
        told = "-" if near is None else f"{near:.2f}"
        lines.append(
            f"{one.ratio:6.3f}  {one.rank:>3}/{one.tried:<3}  {told:>9}  {one.picked} |"
            f" {one.best} | {key(one.problem)}"
        )
    total = summarize(scores)
    lines.append(
        f"predicted pick over best, {total.problems} problems: geometric mean"
        f" {total.mean:.3f}, worst {total.worst:.3f}; {total.exact} exact,"
        f" {total.failed} failed"
    )
    return "\n".join(lines) + "\n"
