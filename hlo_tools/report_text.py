"""A `RewriteReport` as plain text: what people read first.

Order: one line that says what happened, the table of sites, in full the reason
for everything that was not bound (near misses in the form of a compiler's
diagnostic), the passes. Reads at 80 columns and without color; needs nothing
outside the standard library.
"""

import shutil
import textwrap
from collections.abc import Mapping, Sequence

from hlo_tools.report import BASELINE, STATUSES, NearMiss, RewriteReport, SiteReport
from hlo_tools.report_format import (
    SiteGroup,
    caret_line,
    describe_attributes,
    describe_candidate,
    describe_gradient,
    fold_sites,
    format_bytes,
    format_flops,
    format_seconds,
    printable,
    short_location,
    source_line,
    split_location,
)

_COLORS = {"bound": "32", "outlined": "36", "inlined": "33", "near-miss": "35"}
_COLORS |= {"failed": "31;1", "bold": "1", "dim": "2"}


def summary(report: RewriteReport) -> str:
    """One line on what happened, pattern by pattern."""
    patterns = dict.fromkeys(site.pattern for site in report.sites)
    if not patterns:
        return "no site matched: the program is unchanged"
    return "; ".join(
        _pattern_summary(name, [s for s in report.sites if s.pattern == name])
        for name in patterns
    )


def _pattern_summary(pattern: str, sites: Sequence[SiteReport]) -> str:
    matched = [site for site in sites if site.status != "near-miss"]
    bound = [site for site in sites if site.status == "bound"]
    parts = []
    if matched:
        names = ", ".join(dict.fromkeys(site.implementation or "?" for site in bound))
        noun = "site" if len(matched) == 1 else "sites"
        parts.append(
            f"{len(bound)} of {len(matched)} {noun} bound" + f" ({names})" * bool(bound)
        )
    saved = [site.bytes_saved for site in bound if site.bytes_saved > 0]
    if saved:
        # Whether the savings of several sites add up depends on what lives at
        # the same time, which only XLA's buffer assignment knows.
        bound_word = "up to " if len(saved) > 1 else ""
        parts.append(f"saves {bound_word}{format_bytes(sum(saved))} of temp")
    speedup = _speedup(bound)
    if speedup is not None:
        parts.append(f"predicted {speedup:.1f}x on {_those(len(bound))}")
    for status, noun in (("outlined", "outlined"), ("failed", "failed")):
        count = sum(site.status == status for site in sites)
        parts += [f"{count} {noun}"] * bool(count)
    misses = len(sites) - len(matched)
    parts += [f"{misses} near {'miss' if misses == 1 else 'misses'}"] * bool(misses)
    return f"{pattern}: " + ", ".join(parts)


def summary_line(report: RewriteReport) -> str:
    """See `RewriteReport.summary_line`."""
    matched = [site for site in report.sites if site.status != "near-miss"]
    bound = report.with_status("bound")
    counts = []
    for pattern in dict.fromkeys(site.pattern for site in matched):
        here = [site for site in matched if site.pattern == pattern]
        ours = [site for site in bound if site.pattern == pattern]
        noun = "site" if len(here) == 1 else "sites"
        counts.append(f"{len(ours)}/{len(here)} {pattern} {noun}")
    line = (", ".join(counts) or "no site") + " bound"
    gradients = sum(site.gradient_bound for site in bound)
    line += f" ({gradients} with gradient)" * bool(gradients)
    line += f" on {report.target}" * bool(report.target)
    gains = []
    speedup = _speedup(bound) if bound else None
    if speedup is not None:
        # Of the sites: what else the program does is not predicted.
        gains.append(f"predicted {speedup:.2f}x at {_those(len(bound))}")
    saved = [site.bytes_saved for site in bound if site.bytes_saved > 0]
    if saved:
        up_to = "up to " * (len(saved) > 1)
        gains.append(f"saves {up_to}{format_bytes(sum(saved))}")
    parts = [", ".join(gains)] * bool(gains)
    if report.measured is not None:
        parts.append(f"measured {describe_measured(report.measured)}")
    return printable(f"hlo_tools: {line}" + f": {'; '.join(parts)}" * bool(parts))


def _those(count: int) -> str:
    return "that site" if count == 1 else "those sites"


def describe_measured(measured: Mapping[str, float]) -> str:
    """A measured gain as a factor; "?" where a time is missing or zero."""
    before, after = measured.get("baseline_seconds"), measured.get("seconds")
    return f"{before / after:.2f}x" if before and after else "?"


def measured_line(measured: Mapping[str, float]) -> str:
    """A measured gain in full."""
    before, after = measured.get("baseline_seconds"), measured.get("seconds")
    times = f"{format_seconds(before)} -> {format_seconds(after)}"
    return f"measured: {describe_measured(measured)} ({times})"


def _speedup(sites: Sequence[SiteReport]) -> float | None:
    """Predicted time of XLA's code over ours, summed over the sites."""
    before = after = 0.0
    for site in sites:
        if site.speedup() is None:
            return None
        runs = site.executions or 1
        before += runs * site.predicted_seconds[BASELINE]
        after += runs * site.predicted_seconds[site.implementation or ""]
    return before / after if after > 0 else None


def render_text(
    report: RewriteReport, *, color: bool = False, width: int | None = None
) -> str:
    """The whole report; see `RewriteReport.text`."""
    if width is None:
        width = min(shutil.get_terminal_size(fallback=(80, 24)).columns, 120)
    page = _Page(max(width, 40), color)
    name = report.module or "module"
    page.paragraph(f"{name} on {report.target}: " if report.target else f"{name}: ")
    page.lines[-1] = page.paint("bold", page.lines[-1])
    page.paragraph(report.summary(), indent="  ")
    if report.measured is not None:
        page.paragraph(measured_line(report.measured), indent="  ")
    groups = fold_sites(report.sites)
    if groups:
        known = any(site.predicted_seconds for site in report.sites)
        page.heading("Sites", "(times and bytes: one execution, predicted)" * known)
        page.sites(groups)
    page.verified(report)
    unbound = [group for group in groups if group.site.status != "bound"]
    for status in reversed(STATUSES):  # the gravest first
        for group in (g for g in unbound if g.site.status == status):
            page.unbound(group)
    if report.passes:
        page.passes(report)
    if report.notes:
        page.heading("Notes")
        for note in report.notes:
            page.paragraph(note, indent="  ")
    if report.versions:
        page.lines.append("")
        versions = [f"{name} {text}" for name, text in report.versions.items()]
        page.paragraph(", ".join(versions))
    return "\n".join(line.rstrip() for line in page.lines) + "\n"


class _Page:
    """Lines of at most `width` columns, colored or not."""

    def __init__(self, width: int, color: bool):
        self.width = width
        self.color = color
        self.lines: list[str] = []

    def paint(self, style: str, text: str) -> str:
        return f"\x1b[{_COLORS[style]}m{text}\x1b[0m" if self.color else text

    def paragraph(self, text: str, indent: str = "", first: str | None = None) -> None:
        """Wrap `text` under `indent`; its first line starts with `first`."""
        self.lines += textwrap.wrap(
            printable(text),
            self.width,
            initial_indent=indent if first is None else first,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [first or indent]

    def heading(self, title: str, remark: str = "") -> None:
        self.lines.append("")
        self.lines.append(
            self.paint("bold", title) + (f" {self.paint('dim', remark)}" * bool(remark))
        )

    def sites(self, groups: Sequence[SiteGroup]) -> None:
        """The table: one row and one line of attributes for each group."""
        rows = [("site", "where", "status", "time", "saves")]
        for group in groups:
            rows.append(_site_cells(group))
        keep = [i for i in range(5) if any(row[i] for row in rows[1:])]
        rows = [tuple(row[i] for i in keep) for row in rows]
        widths = _fit(rows, self.width, has_places=1 in keep)
        for number, row in enumerate(rows):
            cells = [
                _keep_end(cell, size).ljust(size)
                for cell, size in zip(row, widths, strict=True)
            ]
            if number == 0:
                self.lines.append(self.paint("dim", "  " + "  ".join(cells).rstrip()))
                continue
            site = groups[number - 1].site
            status = keep.index(2)
            shown = cells[status].rstrip()
            padding = " " * (len(cells[status]) - len(shown))
            cells[status] = self.paint(site.status, shown) + padding
            self.lines.append("  " + "  ".join(cells))
            what = describe_attributes(site.attributes)
            self.paragraph(f"{site.pattern}: {what}" if what else site.pattern, " " * 4)
            if site.gradient is not None:
                self.paragraph(describe_gradient(site.gradient), " " * 4)
            if site.recompute_avoided_flops:
                avoided = format_flops(site.recompute_avoided_flops)
                self.paragraph(f"avoids recomputing {avoided}", " " * 4)

    def verified(self, report: RewriteReport) -> None:
        """One line on the numeric checks, if any ran."""
        checks = [site.verify for site in report.sites if site.verify is not None]
        if not checks:
            return
        errors = [check.max_error for check in checks if check.passed]
        passed = f"verified: {len(errors)} of {len(checks)} sites within tolerance"
        worst = f", largest error {max(errors):.3g}" if errors else ""
        self.lines.append("")
        self.paragraph(passed + worst)

    def unbound(self, group: SiteGroup) -> None:
        """Why a site was not bound, in full."""
        site = group.site
        self.lines.append("")
        title = site.status.replace("-", " ")
        where = f" at {printable(site.location)}" if site.location else ""
        label = f"{self.paint(site.status, title)}: {printable(group.label)}{where}"
        self.lines.append(label)
        if site.reason:
            self.paragraph(site.reason, indent="  ")
        if site.near_miss is not None:
            self.near_miss(site.near_miss)
        if site.verify is not None and not site.verify.passed:
            check = site.verify
            self.paragraph(
                f"largest error {check.max_error:.3g}, tolerance "
                f"{check.tolerance:.3g}. {check.detail}",
                indent="  ",
            )
        for candidate in site.candidates:
            self.paragraph(
                describe_candidate(candidate),
                indent=" " * 6,
                first=f"    {printable(candidate.name)}: ",
            )

    def near_miss(self, miss: NearMiss) -> None:
        """The first differing op as a compiler would show it."""
        self.paragraph(
            f"first differing operation: {miss.operation}", indent=" " * 4, first="  "
        )
        if miss.location:
            file, line = split_location(miss.location)
            gutter = " " * len(str(line or ""))
            self.lines.append(f"  {gutter}--> {printable(miss.location)}")
            source = source_line(file, line)
            if source:
                room = self.width - len(gutter) - 5
                shown = source if len(source) <= room else source[: room - 3] + "..."
                carets = caret_line(shown)
                self.lines.append(f"  {gutter} |")
                self.lines.append(f"  {line} | {shown}")
                self.lines.append(f"  {gutter} | {self.paint('near-miss', carets)}")
        for name in ("got", "expected", "edit"):
            self.paragraph(
                getattr(miss, name), indent=" " * 14, first=f"  = {name + ':':<10}"
            )

    def passes(self, report: RewriteReport) -> None:
        """The passes with their times and op counts."""
        self.heading("Passes", f"({format_seconds(report.seconds)} in all)")
        size = max(22, *(len(item.name) for item in report.passes))
        header = f"  {'pass':<{size}}  {'ms':>8}  {'ops before':>10}  {'after':>8}"
        self.lines.append(self.paint("dim", header))
        for item in report.passes:
            self.lines.append(
                f"  {printable(item.name):<{size}}  {item.seconds * 1e3:>8.1f}"
                f"  {item.ops_before:>10}  {item.ops_after:>8}"
                + ("" if item.changed else "  unchanged")
            )


def _fit(rows: Sequence[tuple[str, ...]], width: int, has_places: bool) -> list[int]:
    """Widths of the columns; ids and places give way to what follows them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for column, least in ((0, 20), (1, 12)) if has_places else ((0, 20),):
        excess = sum(widths) + 2 * len(widths) - width
        wanted = max(widths[column] - max(excess, 0), least)
        widths[column] = min(widths[column], wanted)
    return widths


def _site_cells(group: SiteGroup) -> tuple[str, str, str, str, str]:
    site = group.site
    status = site.status
    if site.implementation:
        status = f"{status}: {site.implementation}"
    times = site.predicted_seconds
    shown = [times.get(BASELINE), times.get(site.implementation or "")]
    time = " -> ".join(format_seconds(t) for t in shown if t is not None)
    saves = format_bytes(site.bytes_saved) if site.bytes_saved else ""
    cells = (group.label, short_location(site.location), status, time, saves)
    return tuple(map(printable, cells))  # type: ignore[return-value]


def _keep_end(text: str, size: int) -> str:
    """`text` in at most `size` columns; what goes is its beginning."""
    return text if len(text) <= size else ".." + text[len(text) - size + 2 :]
