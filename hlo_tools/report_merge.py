"""One report for a program that compiles many modules."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from hlo_tools.report import PassReport, RewriteReport


def merge(reports: Sequence[RewriteReport], program: str) -> RewriteReport:
    """Put the reports of a program's modules into one of the same form.

    Args:
        reports: in the order of compilation.
        program: the name that the result goes by in place of a module's.

    Returns:
        All sites, their ids led by their module's name ("jit_step/attention.0");
        each step of the pipeline once, with the sums of its times and op counts;
        a measured gain only if it is that of the one module that has sites.
    """
    merged = RewriteReport(
        module=program, target=", ".join(dict.fromkeys(r.target for r in reports))
    )
    seen: Counter[str] = Counter()
    totals: dict[tuple[str, int], list[PassReport]] = {}
    for report in reports:
        seen[report.module] += 1
        count = seen[report.module]
        name = report.module if count == 1 else f"{report.module}#{count}"
        merged.sites += [
            dataclasses.replace(site, id=f"{name}/{site.id}") for site in report.sites
        ]
        turns: Counter[str] = Counter()  # a pipeline may run a pass several times
        for item in report.passes:
            turns[item.name] += 1
            totals.setdefault((item.name, turns[item.name]), []).append(item)
        merged.versions |= report.versions
        merged.seconds += report.seconds if math.isfinite(report.seconds) else 0.0
        merged.notes += [f"{name}: {note}" for note in report.notes]
    merged.passes = [_sum(items) for items in totals.values()]
    with_sites = sum(bool(report.sites) for report in reports)
    if with_sites == 1:  # times of several modules do not add up: each runs its own way
        merged.measured = next(r.measured for r in reports if r.sites)
    counts = f"{len(reports)} modules went through the passes, {with_sites} with sites"
    merged.notes.insert(0, counts if reports else "no module went through the passes")
    return merged


def _sum(items: Sequence[PassReport]) -> PassReport:
    return PassReport(
        name=items[0].name,
        seconds=sum(item.seconds for item in items),
        ops_before=sum(item.ops_before for item in items),
        ops_after=sum(item.ops_after for item in items),
        changed=any(item.changed for item in items),
    )
