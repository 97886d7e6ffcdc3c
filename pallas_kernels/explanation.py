"""An `Explanation` as text: the candidates, the parts of their times, and the pick."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from pallas_kernels.kernel import KernelConfig, Prediction
from pallas_kernels.tuning import Explanation

MICRO = 1e-6
_WIDTH = 200  # of text that goes to no terminal: no column is cut


def explanation_dict(explanation: Explanation) -> dict[str, Any]:
    """Returns all of it as plain values, for JSON."""
    selection = explanation.selection
    return {
        "family": explanation.family,
        "device": explanation.target.spec.name,
        "problem": asdict(explanation.problem),
        "config": selection.config.to_dict(),
        "source": selection.source,
        "why": selection.why,
        "candidates": [
            {
                "config": config.to_dict(),
                "seconds": prediction.seconds,
                "terms": [asdict(term) for term in prediction.terms],
                "notes": dict(prediction.notes),
            }
            for config, prediction in explanation.ranking
        ],
        "refused": [
            {"config": config.to_dict(), "reason": reason}
            for config, reason in explanation.refused.items()
        ],
    }


def explanation_text(
    explanation: Explanation, most: int = 12, color: bool = False
) -> str:
    """Returns it as a table.

    Args:
      explanation: of `ConfigSelector.explain`.
      most: how many candidates to show; the pick is among them.
      color: with terminal codes.
    """
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(
        file=buffer, width=_WIDTH, force_terminal=color, highlight=False, emoji=False,
        markup=False,
    )  # fmt: skip
    console.print(_header(explanation))
    console.print(_candidates(explanation, most))
    for line in _refusals(explanation):
        console.print(line)
    lines = (line.rstrip() for line in buffer.getvalue().splitlines())
    return "\n".join(lines) + "\n"


def _header(explanation: Explanation) -> str:
    selection, target = explanation.selection, explanation.target
    parts = {
        name: value
        for name, value in asdict(explanation.problem).items()
        if value not in (None, False)  # 0 equals False
    }
    problem = " ".join(f"{name}={value}" for name, value in parts.items())
    seconds = selection.prediction.seconds
    lines = [
        f"{explanation.family} on {target.spec.name}: {problem}",
        f"{selection.source}: {selection.config}; {selection.why}",
        f"predicted {seconds / MICRO:.1f} us, most of it"
        f" {selection.prediction.bound_by}",
    ]
    return "\n".join([*lines, target.note] if target.note else lines)


def _candidates(explanation: Explanation, most: int) -> Any:
    from rich.table import Table

    shown = list(explanation.ranking[:most])
    chosen = explanation.selection.config
    if chosen not in [config for config, _ in shown]:
        shown.append((chosen, explanation.selection.prediction))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in chosen.to_dict():
        table.add_column(name, justify="right")
    table.add_column("us", justify="right")
    # "exposed (busy)": what a part adds, and how long its resource works in all
    names = [term.name for term in explanation.selection.prediction.terms]
    for name in names:
        table.add_column(name, justify="right")
    for config, prediction in shown:
        table.add_row(*_row(config, prediction, names, config == chosen))
    total = len(explanation.ranking)
    table.caption = (
        f"{len(shown)} of {total} candidates; parts in us: what each adds, and in"
        " brackets how long it is busy behind others"
    )
    table.caption_justify = "left"
    return table


def _row(
    config: KernelConfig, prediction: Prediction, names: list[str], chosen: bool
) -> list[str]:
    terms = {term.name: term for term in prediction.terms}
    cells = ["*" if chosen else ""]
    cells += [str(value) for value in config.to_dict().values()]
    cells.append(f"{prediction.seconds / MICRO:.1f}")
    for name in names:
        term = terms[name]
        cell = f"{term.exposed / MICRO:.1f}"
        hidden = term.busy - term.exposed > 0.001 * prediction.seconds
        cells.append(f"{cell} ({term.busy / MICRO:.1f})" if hidden else cell)
    return cells


def _refusals(explanation: Explanation) -> list[str]:
    """The illegal configurations, by reason."""
    by_reason: dict[str, list[KernelConfig]] = defaultdict(list)
    for config, reason in explanation.refused.items():
        by_reason[reason].append(config)
    if not by_reason:
        return []
    names = ", ".join(explanation.selection.config.to_dict())
    lines = [f"can not run ({names}):"]
    for reason, configs in by_reason.items():
        values = [
            "x".join(str(value) for value in config.to_dict().values())
            for config in configs
        ]
        more = f" and {len(values) - 6} more" if len(values) > 6 else ""
        lines.append(f"  {reason}: {' '.join(values[:6])}{more}")
    return lines
