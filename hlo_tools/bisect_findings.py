"""What a bisection of modules found, for people and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlo_tools.bisect import Bisection, Culprit, Verdict
from hlo_tools.bisect_module import CheckError, ModuleSubject
from hlo_tools.bisect_reproducer import Reproducer, write_reproducer
from hlo_tools.bisect_script import ProgramSubject
from hlo_tools.pipeline import PassPipeline
from hlo_tools.report import SiteReport
from hlo_tools.report_format import short_location

SCHEMA_VERSION = 1

Tell = Callable[[str], Any]


@dataclass(frozen=True)
class Finding:
    """The verdict on one module, or on a program that was run anew for each check.

    Attributes:
      name: of the module or the program.
      target: what it was compiled for.
      pipeline: the passes that were bisected.
      verdict: the outcome.
      sites: reports of the culprit's sites, their ids as in `verdict`.
      reproducer: None without a culprit.
    """

    name: str
    target: str
    pipeline: PassPipeline
    verdict: Verdict
    sites: tuple[SiteReport, ...] = ()
    reproducer: Reproducer | None = None

    @property
    def culprit(self) -> Culprit | None:
        return self.verdict.culprit

    @property
    def is_workaround(self) -> bool:
        """Whether the program is good with the culprit's sites left alone."""
        culprit = self.culprit
        return culprit is not None and bool(culprit.sites) and not culprit.others

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON-ready values."""
        culprit = self.culprit
        data: dict[str, Any] = {
            "name": self.name,
            "target": self.target,
            "pipeline": str(self.pipeline),
            "checks": self.verdict.checks,
            "broken_check": self.verdict.broken_check or None,
            "culprit": culprit and dataclasses.asdict(culprit),
            "sites": [site.to_dict() for site in self.sites],
            "reproducer": None,
        }
        if self.reproducer is not None:
            data["reproducer"] = {
                "what": self.reproducer.what,
                "shows": self.reproducer.shows or None,
                "files": [str(file) for file in self.reproducer.files],
            }
        return data

    def text(self) -> str:
        """The finding in a few lines."""
        head = f"{self.name} on {self.target}: "
        count = self.verdict.checks
        checks = f"{count} check{'s' * (count != 1)}"
        if self.verdict.broken_check:
            why = self.verdict.broken_check
            return f"{head}the check can not tell good from bad: {why}\n"
        culprit = self.culprit
        if culprit is None:
            return f"{head}nothing wrong found ({checks})\n"
        lines = [f"{head}{culprit.name} is to blame ({checks})"]
        if culprit.detail:
            lines.append(f"  error: {culprit.detail}")
        for group in culprit.groups:
            together = " (only together)" * (len(group) > 1)
            lines += [f"  site: {self._describe(site)}{together}" for site in group]
        if culprit.others:
            lines.append("  more sites are wrong beside these")
        if self.is_workaround:
            ids = "+".join(
                site if "/" in site else f"{self.name}/{site}" for site in culprit.sites
            )
            lines.append(f"  without: HLO_TOOLS_SKIP_SITES={ids}, and all is well")
        good = f"--passes '{culprit.before}'" if culprit.before else "as it is written"
        lines.append(f"  good: {good}")
        lines.append(f"  bad:  --passes '{culprit.reduced or culprit.after}'")
        if self.reproducer is not None:
            files = self.reproducer.files
            lines.append(f"  reproducer ({self.reproducer.what}): python {files[0]}")
            if not self.reproducer.shows:
                lines.append("  on random inputs the reproducer shows no difference")
        return "\n".join(lines) + "\n"

    def _describe(self, site: str) -> str:
        for report in self.sites:
            if report.id == site:
                where = f" at {short_location(report.location)}" * bool(report.location)
                what = report.implementation
                return f"{site}{where}" + (f", bound to {what}" if what else "")
        return site


def bisect_module(
    subject: ModuleSubject, pipeline: PassPipeline, folder: Path, tell: Tell
) -> Finding:
    """Bisects one module, and writes a reproducer if something is wrong.

    Args:
      subject: the module.
      pipeline: the passes in question.
      folder: for the reproducer.
      tell: called with one line on what is being done.
    """
    search = Bisection(pipeline, subject.outcome, subject.sites, tell)
    try:
        verdict = search.run()
    except CheckError as error:
        verdict = Verdict(None, str(error), search.checks)
    found = Finding(subject.name, subject.target.spec.name, pipeline, verdict)
    if verdict.culprit is None:
        return found
    tell("writing the reproducer")
    reproducer = write_reproducer(folder, subject, pipeline, verdict.culprit)
    sites = site_reports(subject, pipeline, verdict.culprit)
    return dataclasses.replace(found, sites=sites, reproducer=reproducer)


def site_reports(
    subject: ModuleSubject, pipeline: PassPipeline, culprit: Culprit
) -> tuple[SiteReport, ...]:
    """The reports of a culprit's sites: from the bad pipeline if that ran at all."""
    specs = [culprit.after, culprit.reduced]
    specs.append(str(PassPipeline(pipeline.passes[: culprit.position])))
    known = {}
    for spec in specs:
        for report in subject.candidate(spec).report.sites:
            known.setdefault(report.id, report)
    return tuple(known[site] for site in culprit.sites if site in known)


def bisect_program(
    name: str,
    program: ProgramSubject,
    subject_of: Callable[[str], ModuleSubject],
    pipeline: PassPipeline,
    folder: Path,
    tell: Tell,
) -> Finding:
    """Bisects a program that is run anew for each check.

    Args:
      name: of the program.
      program: runs it.
      subject_of: text of a module -> the module as a subject.
      pipeline: the passes in question.
      folder: for the reproducer.
      tell: called with one line on what is being done.
    """
    search = Bisection(pipeline, program.outcome, program.sites, tell)
    try:
        verdict = search.run()
    except CheckError as error:
        verdict = Verdict(None, str(error), search.checks)
    target = ", ".join(dict.fromkeys(m.report.target for m in program.modules))
    found = Finding(name, target, pipeline, verdict)
    culprit = verdict.culprit
    if culprit is None or not program.modules:
        return found
    tell("writing the reproducer")
    module = program.modules[0]
    if culprit.sites:
        module = program.module_of(culprit.sites[0])
    subject = subject_of(module.original)
    reproducer = write_reproducer(folder, subject, pipeline, culprit)
    reports = {
        f"{m.report.module}/{site.id}": site
        for m in program.modules
        for site in m.report.sites
    }
    sites = tuple(
        dataclasses.replace(reports[site], id=site)
        for site in culprit.sites
        if site in reports
    )
    return dataclasses.replace(found, sites=sites, reproducer=reproducer)


def exit_status(findings: Sequence[Finding]) -> int:
    """1 if something is to blame, else 2 if a check could not tell, else 0."""
    if any(finding.culprit for finding in findings):
        return 1
    return 2 * any(finding.verdict.broken_check for finding in findings)


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """All findings as one JSON-ready value."""
    return {
        "schema_version": SCHEMA_VERSION,
        "findings": [finding.to_dict() for finding in findings],
    }
