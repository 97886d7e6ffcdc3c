"""`hlo-tools cost`: FLOPs, bytes and predicted times of a module."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hlo_tools.cli_commands import stay_off_devices
from hlo_tools.cli_output import FORMATS, progress
from hlo_tools.cli_parsing import check_choice
from hlo_tools.errors import HloToolsError

_ROWS = 15


def cost(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE|DIR", help="HLO text or proto, or a dump folder."),
    ],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="NAME", help="Device: cpu, h200, v5p, ..."),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="text or json.")
    ] = "text",
) -> Callable[[], int]:
    """Count what a module computes and moves, and predict its time on a device."""
    check_choice("format", form, FORMATS[:2])
    return partial(run, file, target, form)


def run(file: str, target: str | None, form: str) -> int:
    """Prints the costs of each module."""
    stay_off_devices()
    from hlo_tools.hlo import parse, read_dump
    from hlo_tools.hlo.cost import analyze
    from hlo_tools.targets import Target

    device = Target.parse(target) if target else None
    paths = [Path(file)]
    if paths[0].is_dir():
        found = (entry.files.get("after_optimizations") for entry in read_dump(file))
        paths = [path for path in found if path is not None]
        if not paths:
            raise HloToolsError(f"{file}: no module after optimization in this folder")
    costs = []
    with progress("counting"):
        for path in paths:
            costs.append(analyze(parse(path), device))
    if form == "json":
        rows = [found.as_dict() for found in costs]
        print(json.dumps(rows if Path(file).is_dir() else rows[0], indent=1))
    else:
        sys.stdout.write("\n".join(map(as_text, costs)))
    return 0


def as_text(found: Any) -> str:
    """The costs for a reader: totals, loops, collectives, the largest instructions."""
    from hlo_tools.report_format import format_bytes, format_flops, format_seconds

    total = found.total
    first = f"{found.module}: {format_flops(total.flops)}"
    first += f", {format_bytes(total.bytes)} accessed"
    if total.seconds is not None:
        first += f", {format_seconds(total.seconds)} by the roofline of {found.target}"
    lines = [
        first,
        f"  XLA's count (loops once): {format_flops(found.total_once.flops)}",
    ]
    for name, count in found.loops.items():
        lines.append(f"  loop {name}: {'?' if count is None else count} trips")
    for row in found.collectives:
        lines.append(
            f"  {row.opcode} {row.name}: {format_bytes(row.bytes)}, {row.group_count} "
            f"groups of {row.group_size or '?'}, {row.trips} times"
        )
    rows = sorted(found.instructions, key=_weight, reverse=True)[:_ROWS]
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        if not _weight(row):
            continue
        time = "" if row.seconds is None else format_seconds(_weight(row))
        flops = format_flops(row.flops * row.trips)
        lines.append(
            f"  {row.name:<{width}} {time:>8} {flops:>12} "
            f"{format_bytes(row.bytes * row.trips):>9} {row.intensity:>7.1f}/byte"
            f"  {row.source}"
        )
    return "\n".join(lines) + "\n"


def _weight(row: Any) -> float:
    return (row.bytes if row.seconds is None else row.seconds) * row.trips
