"""The tables of benchmarks/attention.py, and its figures for the JSON."""

from __future__ import annotations

import sys
from typing import Any

from attention_contenders import BASELINES
from attention_exact import limit
from attention_measuring import PARTS, Cell
from attention_rows import Row

Results = dict[Row, dict[str, dict[str, Cell]]]
TITLES = {"forward": "Forward", "both": "Forward and backward"}
WIDTH = 132  # where the output is no terminal


def ratio(by_name: dict[str, dict[str, Cell]], part: str, name: str, baseline: str):
    """Returns how many times as fast as `baseline` one is, or None."""
    if baseline not in by_name:
        return None
    ours, other = by_name[name][part], by_name[baseline][part]
    if ours.median is None or other.median is None or ours.timer != other.timer:
        return None
    return other.median / ours.median


def tflops(row: Row, part: str, cell: Cell) -> float | None:
    """Returns 10^12 operations a second, by the convention of `Row.operations`."""
    if cell.median is None:
        return None
    return row.operations(part) / cell.median / 1e9


def spread(cell: Cell) -> float | None:
    """Returns (largest - smallest) / median of the rounds."""
    if cell.median is None:
        return None
    return (max(cell.milliseconds) - min(cell.milliseconds)) / cell.median


def summary(results: Results) -> list[dict[str, Any]]:
    """Returns all figures, for the JSON."""
    found = []
    for row, by_name in results.items():
        sizes = [row.batch, row.length, row.heads, row.kv_heads, row.depth]
        entry: dict[str, Any] = {"row": row.name, "B,S,H,K,D": sizes}
        entry |= {"dtype": row.dtype, "implementations": {}}
        for name, by_part in by_name.items():
            entry["implementations"][name] = {
                part: _figures(row, by_name, part, name, by_part[part])
                for part in PARTS
            }
        found.append(entry)
    return found


def _figures(row: Row, by_name, part: str, name: str, cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = {"status": cell.status}
    if cell.reason:
        found["reason"] = cell.reason
    if cell.errors:
        found["errors"] = cell.errors
        found["limits"] = {key: limit(row, key) for key in cell.errors}
    if cell.median is None:
        return found
    found |= {
        "ms": cell.median,
        "ms_of_rounds": cell.milliseconds,
        "timer": cell.timer,
        "tflops": tflops(row, part, cell),
    }
    for baseline in BASELINES:
        times = ratio(by_name, part, name, baseline)
        if times is not None:
            found[f"speed_over_{baseline}"] = times
    return found


def print_tables(results: Results, record: dict[str, Any]) -> None:
    """Prints a table a part, and below them why figures are missing."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    names = [name for by_name in results.values() for name in by_name]
    baselines = [name for name in BASELINES if name in names]
    for part in PARTS:
        console.print(_table(results, part, baselines))
    reasons: dict[str, list[str]] = {}
    for row, by_name in results.items():
        for name, by_part in by_name.items():
            for part in PARTS:
                if by_part[part].reason:
                    why = f"{name}: {by_part[part].status}: {by_part[part].reason}"
                    reasons.setdefault(why, []).append(f"{row.name} ({part})")
    for why, where in reasons.items():
        console.print(f"{why}\n    {', '.join(where)}", markup=False)
    if record["rows_left_out"]:
        console.print(f"out of time: {', '.join(record['rows_left_out'])}")
    versions = ", ".join(f"{key} {x}" for key, x in record["versions"].items())
    console.print(
        f"{record['device']}, {versions}; {record['options']['rounds']} rounds, seed"
        f" {record['options']['seed']}; {record['seconds']:.0f} s, of which"
        f" {record['compile_seconds']:.0f} s compiling"
    )


def _table(results: Results, part: str, baselines: list[str]) -> Any:
    from rich.table import Table

    title = TITLES[part]
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    table.add_column("row", no_wrap=True)
    table.add_column("implementation")
    columns = ("error / limit", "ms", "spread", "TFLOP/s")
    for column in (*columns, *(f"x {name}" for name in baselines)):
        table.add_column(column, justify="right", no_wrap=True)
    for row, by_name in results.items():
        for number, (name, by_part) in enumerate(by_name.items()):
            cell = by_part[part]
            head = row.name if number == 0 else ""
            ratios = [ratio(by_name, part, name, other) for other in baselines]
            table.add_row(head, name, _checked(row, cell), *_times(row, part, cell),
                          *(f"{x:.3f}" if x else "" for x in ratios))  # fmt: skip
    return table


def _checked(row: Row, cell: Cell) -> str:
    if cell.status == "wrong":
        return "[bold red]WRONG[/]"
    if not cell.errors:
        return cell.status
    return f"{max(x / limit(row, name) for name, x in cell.errors.items()):.2f}"


def _times(row: Row, part: str, cell: Cell) -> tuple[str, str, str]:
    rate, share = tflops(row, part, cell), spread(cell)
    if cell.median is None or rate is None or share is None:
        return "", "", ""
    return f"{cell.median:.3f}", f"{share:.1%}", f"{rate:.1f}"
