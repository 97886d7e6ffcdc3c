"""What the stage did, what it almost did, and why not: the report as data.

A `RewriteReport` holds one `SiteReport` for every place that a pass looked at
closely and one `PassReport` for every pass that ran. It is plain data: passes
fill it in, `text`, `html` and `to_json` show it. The JSON form is versioned
(`SCHEMA_VERSION`), described by `report.schema.json` beside this file and in
`docs/report_schema.md`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from hlo_tools.errors import HloToolsError

SCHEMA_VERSION = 1

#: The name under which `SiteReport.predicted_seconds` holds XLA's own code.
BASELINE = "xla"

#: Statuses in the order of how much they ask of the reader, mildest first.
STATUSES = ("bound", "outlined", "inlined", "near-miss", "failed")

#: Statuses that make a command end with "findings".
FINDINGS = ("near-miss", "failed")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation that was considered for a site.

    Args:
        name: name of the implementation ("online", "cudnn", "xla", ...).
        supported: whether it can run this site on this target.
        reason: why not, when it can not; otherwise a remark or None.
        predicted_seconds: predicted time of one execution; None if unknown.
        temp_bytes: temporary memory of one execution; None if unknown.
    """

    name: str
    supported: bool
    reason: str | None = None
    predicted_seconds: float | None = None
    temp_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """Where a match ended, and the smallest change that would let it go on.

    Args:
        operation: the first operation that differs ("stablehlo.divide").
        location: the user's "file:line" for that operation, if known.
        got: what the program has there.
        expected: what the pattern needs there.
        edit: the smallest edit of the program that would match.
    """

    operation: str
    location: str | None
    got: str
    expected: str
    edit: str


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """Outcome of comparing a bound site with its decomposition.

    Args:
        passed: whether the error stayed within the tolerance.
        max_error: the largest error seen; NaN when the values were not finite.
        tolerance: the largest error allowed.
        detail: one sentence on inputs and reference.
    """

    passed: bool
    max_error: float
    tolerance: float
    detail: str = ""


@dataclasses.dataclass
class SiteReport:
    """One place in the program that a pattern matched or nearly matched.

    Args:
        id: unique within the report ("attention.0").
        pattern: name of the pattern ("attention").
        location: the user's "file:line", if known.
        status: one of `STATUSES`.
        implementation: what now computes the site; None unless bound.
        config: settings of that implementation.
        predicted_seconds: implementation name to predicted time of one
            execution; XLA's own code is under `BASELINE`.
        bytes_saved: temporary memory that one execution no longer needs, and what
            loops no longer save of it for the backward pass, for all iterations.
        reason: why the site has this status, as a sentence.
        attributes: semantics of the site (sizes, scale, causal, ...).
        candidates: every implementation considered.
        near_miss: set when the status is "near-miss".
        verify: set when the site was checked numerically.
        executions: how often one run of the program executes it, if known.
        recompute_avoided_flops: operations of one execution that the program did
            twice (as a rematerialized layer does) and no longer does.
        gradient: None unless the program takes gradients of the site. Else
            "wanted" (names: "q", "k", "v", or the number of a side operand),
            "location" (the user's "file:line" of the backward half, or None) and
            "bound" (whether both halves are bound together).
    """

    id: str
    pattern: str
    location: str | None = None
    status: str = "outlined"
    implementation: str | None = None
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    predicted_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    bytes_saved: int = 0
    reason: str = ""
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    candidates: list[Candidate] = dataclasses.field(default_factory=list)
    near_miss: NearMiss | None = None
    verify: VerifyResult | None = None
    executions: int | None = None
    recompute_avoided_flops: int = 0
    gradient: dict[str, Any] | None = None

    @property
    def gradient_bound(self) -> bool:
        """Whether the site's backward half is bound together with it."""
        bound = self.gradient is not None and self.gradient.get("bound", False)
        return self.status == "bound" and bool(bound)

    def speedup(self) -> float | None:
        """Predicted time of XLA's code over that of the implementation used."""
        before = self.predicted_seconds.get(BASELINE, math.nan)
        after = self.predicted_seconds.get(self.implementation or "", math.nan)
        ratio = before / after if after > 0 else math.nan
        return ratio if math.isfinite(ratio) else None

    def to_dict(self) -> dict[str, Any]:
        """The site as JSON-ready values; `from_dict` reads them back."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["config"] = _plain(self.config)
        fields["attributes"] = _plain(self.attributes)
        fields["predicted_seconds"] = {
            name: _finite(value) for name, value in self.predicted_seconds.items()
        }
        fields["bytes_saved"] = int(self.bytes_saved)
        fields["executions"] = None if self.executions is None else int(self.executions)
        fields["recompute_avoided_flops"] = int(self.recompute_avoided_flops)
        fields["gradient"] = _plain(self.gradient)
        fields["candidates"] = [_record(item) for item in self.candidates]
        fields["near_miss"] = self.near_miss and _record(self.near_miss)
        fields["verify"] = self.verify and _record(self.verify)
        return fields

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SiteReport":
        """Read what `to_dict` wrote; unknown keys are ignored."""
        site = _build(cls, data)
        site.predicted_seconds = {
            name: math.nan if value is None else float(value)
            for name, value in site.predicted_seconds.items()
        }
        site.candidates = [_build(Candidate, item) for item in site.candidates]
        if site.near_miss is not None:
            site.near_miss = _build(NearMiss, site.near_miss)
        if site.verify is not None:
            verify = dict(site.verify)
            for name in ("max_error", "tolerance"):
                verify[name] = math.nan if verify[name] is None else verify[name]
            site.verify = _build(VerifyResult, verify)
        return site


@dataclasses.dataclass(frozen=True)
class PassReport:
    """What one pass cost and did.

    Args:
        name: the pass as the pipeline spec spells it.
        seconds: wall time.
        ops_before: operations in the module before it.
        ops_after: operations in the module after it.
        changed: whether it changed the module.
    """

    name: str
    seconds: float
    ops_before: int
    ops_after: int
    changed: bool


@dataclasses.dataclass
class RewriteReport:
    """Everything the pipeline says about one module.

    Args:
        module: name of the module ("jit_train_step").
        target: name of the target ("h200").
        sites: in program order.
        passes: in the order they ran.
        versions: package name to version ("jax": "0.11.2").
        seconds: wall time of the whole pipeline.
        notes: sentences that belong to no site.
        measured: None unless the gain was measured. Else "baseline_seconds" of the
            program under plain `jax.jit` and "seconds" with the stage.
    """

    module: str = ""
    target: str = ""
    sites: list[SiteReport] = dataclasses.field(default_factory=list)
    passes: list[PassReport] = dataclasses.field(default_factory=list)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    notes: list[str] = dataclasses.field(default_factory=list)
    measured: dict[str, float] | None = None

    def with_status(self, *statuses: str) -> list[SiteReport]:
        """The sites that have one of `statuses`, in program order."""
        return [site for site in self.sites if site.status in statuses]

    def findings(self) -> list[SiteReport]:
        """The sites that ask for the reader's attention: `FINDINGS`."""
        return self.with_status(*FINDINGS)

    def summary(self) -> str:
        """One line on what happened."""
        from hlo_tools.report_text import summary

        return summary(self)

    def summary_line(self) -> str:
        """One line to paste: what was bound where, predicted and measured gain."""
        from hlo_tools.report_text import summary_line

        return summary_line(self)

    def text(self, color: bool = False, width: int | None = None) -> str:
        """The report for people, as plain text.

        Args:
            color: whether to use ANSI colors.
            width: columns; None takes the terminal's, or 80 without one.

        Returns:
            Lines of at most `width` columns, except where a name is longer.
        """
        from hlo_tools.report_text import render_text

        return render_text(self, color=color, width=width)

    def __str__(self) -> str:
        return self.text()

    def html(self) -> str:
        """The report as one self-contained HTML page."""
        from hlo_tools.report_html import render_html

        return render_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values, with its schema version."""
        return {
            "schema_version": SCHEMA_VERSION,
            "module": self.module,
            "target": self.target,
            "seconds": _finite(self.seconds),
            "versions": {name: str(text) for name, text in self.versions.items()},
            "notes": [str(note) for note in self.notes],
            "measured": _plain(self.measured),
            "passes": [_record(item) for item in self.passes],
            "sites": [site.to_dict() for site in self.sites],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as strict JSON: every number is finite.

        Args:
            indent: spaces of each level; None writes one line.
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RewriteReport":
        """Read what `to_dict` wrote.

        Raises:
            HloToolsError: `data` is no report, or one of a newer schema.
        """
        _check_version(data)
        try:
            report = _build(cls, data)
            report.passes = [
                PassReport(**{**_known(PassReport, item), "seconds": _number(item)})
                for item in report.passes
            ]
            report.sites = [SiteReport.from_dict(item) for item in report.sites]
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise HloToolsError(f"not a valid report: {error}") from error
        report.seconds = _number(data)
        return report

    @classmethod
    def from_json(cls, text: str) -> "RewriteReport":
        """Read what `to_json` wrote.

        Raises:
            HloToolsError: `text` is not JSON, no report, or of a newer schema.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise HloToolsError(f"not a report: {error}") from error
        return cls.from_dict(data)


def _check_version(data: Any) -> None:
    version = data.get("schema_version") if isinstance(data, Mapping) else None
    if not isinstance(version, int):
        raise HloToolsError(
            "not a report: expected an object with an integer schema_version, "
            f"got {version!r}"
        )
    if version > SCHEMA_VERSION:
        raise HloToolsError(
            f"this report has schema_version {version}, and this hlo-tools reads "
            f"up to {SCHEMA_VERSION}: read it with the hlo-tools that wrote it, "
            "or a newer one"
        )


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `data` that are fields of `cls`."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in data.items() if name in names}


def _build(cls: type, data: Mapping[str, Any]) -> Any:
    return cls(**_known(cls, data))


def _record(item: Any) -> dict[str, Any]:
    """A flat dataclass as a dict whose numbers are finite."""
    return {
        field.name: _finite(getattr(item, field.name))
        for field in dataclasses.fields(item)
    }


def _number(data: Mapping[str, Any]) -> float:
    seconds = data.get("seconds")
    return math.nan if seconds is None else float(seconds)


def _finite(value: Any) -> Any:
    """`value` as plain JSON; a number that is not finite becomes None."""
    value = _scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _plain(value: Any) -> Any:
    """`value` as JSON: tuples become lists, what JSON lacks becomes text.

    Infinities and NaN become the strings "inf", "-inf" and "nan" here, because
    a mask filled with -inf must not read like one without a fill.
    """
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    value = _scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _scalar(value: Any) -> Any:
    """A bool, int, float, str or None; NumPy scalars become Python's."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 1) == 0:
        return _scalar(item())
    return str(value)
