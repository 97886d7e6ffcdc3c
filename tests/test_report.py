"""The report as data, text, JSON and HTML."""

import dataclasses
import importlib.resources
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hlo_tools.errors import HloToolsError
from hlo_tools.report import (
    SCHEMA_VERSION,
    STATUSES,
    Candidate,
    NearMiss,
    PassReport,
    RewriteReport,
    SiteReport,
    VerifyResult,
)
from hlo_tools.report_format import (
    describe_attributes,
    fold_sites,
    format_bytes,
    format_flops,
    format_seconds,
    split_location,
)
from hlo_tools.report_merge import merge

SCHEMA = json.loads(
    importlib.resources.files("hlo_tools").joinpath("report.schema.json").read_text()
)
ATTRIBUTES = {
    "batch": 8,
    "q_len": 2048,
    "k_len": 2048,
    "heads": 16,
    "kv_heads": 4,
    "head_dim": 128,
    "value_dim": 128,
    "dtype": "bfloat16",
    "named": True,
    "scale": 0.08838834764831845,
    "causal": True,
    "offset": 0,
    "has_bias": False,
    "has_mask": True,
    "mask_fill": -math.inf,
}


def bound_site(number: int = 0, **changes) -> SiteReport:
    site = SiteReport(
        id=f"attention.{number}",
        pattern="attention",
        location="model.py:41",
        status="bound",
        implementation="cudnn",
        config={"block": (128, 64)},
        predicted_seconds={"xla": 1.2e-3, "cudnn": 3e-4},
        bytes_saved=275 << 20,
        reason="predicted faster",
        attributes=dict(ATTRIBUTES),
        candidates=[
            Candidate("cudnn", True, None, 3e-4, 0),
            Candidate("online", False, "runs on cpu only"),
            Candidate("xla", True, None, 1.2e-3, 275 << 20),
        ],
    )
    return dataclasses.replace(site, **changes)


def near_miss_site(location: str = "model.py:57") -> SiteReport:
    return SiteReport(
        id="attention.90",
        pattern="attention",
        location=location,
        status="near-miss",
        reason="dropout in the probabilities is a declared non-match",
        near_miss=NearMiss(
            "stablehlo.select",
            location,
            "probabilities times a random mask",
            "probabilities that go into the value product unchanged",
            "call dropout on the output of attention",
        ),
    )


def full_report(location: str = "model.py:57") -> RewriteReport:
    failed = bound_site(
        91,
        status="failed",
        implementation=None,
        verify=VerifyResult(False, math.nan, 1e-2, "42 values are not finite."),
    )
    inlined = bound_site(
        92, status="inlined", implementation=None, reason="nothing is faster"
    )
    return RewriteReport(
        module="jit_step",
        target="h200",
        sites=[
            *(bound_site(i, verify=VerifyResult(True, i * 1e-3, 1e-2)) for i in (0, 1)),
            near_miss_site(location),
            failed,
            inlined,
        ],
        passes=[
            PassReport("normalize", 0.0821, 15012, 9120, True),
            PassReport("clean", 0.002, 9120, 9120, False),
        ],
        versions={"jax": "0.11.2"},
        seconds=0.0841,
        notes=["a note"],
    )


def check(value, schema, path="report"):
    """Checks `value` against the part of JSON Schema that ours uses."""
    if "$ref" in schema:
        return check(value, SCHEMA["$defs"][schema["$ref"].split("/")[-1]], path)
    if "anyOf" in schema:
        null, other = schema["anyOf"]
        return check(value, null if value is None else other, path)
    kinds = {
        "string": str, "null": type(None), "integer": int, "number": int | float,
        "boolean": bool, "object": dict, "array": list,
    }  # fmt: skip
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    good = any(
        isinstance(value, kinds[kind])
        and (kind == "boolean" or not isinstance(value, bool))
        for kind in wanted
    )
    assert good or not wanted, f"{path}: {value!r} is no {wanted}"
    assert value in schema.get("enum", [value]), path
    assert value == schema.get("const", value), path
    if value is not None and "minimum" in schema:
        assert value >= schema["minimum"], path
    assert all(name in value for name in schema.get("required", ())), path
    if isinstance(value, list):
        for item in value:
            check(item, schema.get("items", {}), f"{path}[]")
    if isinstance(value, dict):
        for name, item in value.items():
            rest = schema.get("additionalProperties", {})
            check(item, schema.get("properties", {}).get(name, rest), f"{path}.{name}")
    return None


@pytest.mark.smoke
def test_json_round_trip() -> None:
    report = full_report()
    back = RewriteReport.from_json(report.to_json())
    assert back.to_dict() == report.to_dict()
    assert back.sites[0].candidates == report.sites[0].candidates
    assert back.sites[2].near_miss == report.sites[2].near_miss
    assert math.isnan(back.sites[3].verify.max_error)
    assert back.passes == report.passes
    assert back.text() == report.text()
    assert back.html() == report.html()


def test_json_follows_the_schema() -> None:
    check(full_report().to_dict(), SCHEMA)
    check(RewriteReport().to_dict(), SCHEMA)


def test_schema_names_every_field(repo_dir: Path) -> None:
    page = (repo_dir / "docs" / "report_schema.md").read_text()
    for cls, schema in (
        (RewriteReport, SCHEMA),
        (SiteReport, SCHEMA["$defs"]["site"]),
        (PassReport, SCHEMA["$defs"]["pass"]),
        (Candidate, SCHEMA["$defs"]["candidate"]),
        (NearMiss, SCHEMA["$defs"]["near_miss"]),
        (VerifyResult, SCHEMA["$defs"]["verify"]),
    ):
        fields = {field.name for field in dataclasses.fields(cls)}
        assert set(schema["properties"]) - {"schema_version"} == fields
        assert set(schema["required"]) == set(schema["properties"])
        assert not [name for name in fields if f"`{name}`" not in page]
    assert SCHEMA["$defs"]["site"]["properties"]["status"]["enum"] == list(STATUSES)
    assert SCHEMA["properties"]["schema_version"]["const"] == SCHEMA_VERSION


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(attributes=st.dictionaries(st.text(max_size=6), values, max_size=4))
def test_any_attributes_survive(attributes) -> None:
    report = RewriteReport(sites=[bound_site(attributes=attributes)])
    data = json.loads(report.to_json(), parse_constant=pytest.fail)
    check(data, SCHEMA)
    assert RewriteReport.from_dict(data).to_dict() == data
    report.text()
    report.html()


def test_numbers_are_finite_and_plain() -> None:
    site = bound_site(
        bytes_saved=np.int64(7),
        predicted_seconds={"xla": math.inf, "cudnn": np.float32(0.5)},
        attributes={"mask_fill": -math.inf, "window": (None, 3), "n": np.int32(4)},
    )
    data = json.loads(RewriteReport(sites=[site]).to_json(), parse_constant=pytest.fail)
    (site,) = data["sites"]
    assert site["bytes_saved"] == 7
    assert site["predicted_seconds"] == {"xla": None, "cudnn": 0.5}
    assert site["attributes"] == {"mask_fill": "-inf", "window": [None, 3], "n": 4}


def test_reading_ignores_unknown_properties() -> None:
    data = full_report().to_dict()
    data["later"] = 1
    data["sites"][0]["later"] = 1
    assert RewriteReport.from_dict(data).to_dict() == full_report().to_dict()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 2}', "schema_version 2.* reads up to 1.*newer"),
        ("{}", "expected an object with an integer schema_version"),
        ("[]", "not a report"),
        ("{", "not a report"),
        ('{"schema_version": 1, "sites": [{}]}', "not a valid report"),
        ('{"schema_version": 1, "passes": [3]}', "not a valid report"),
    ],
)
def test_bad_reports_are_refused(text: str, message: str) -> None:
    with pytest.raises(HloToolsError, match=message):
        RewriteReport.from_json(text)


def test_summary() -> None:
    assert full_report().summary() == (
        "attention: 2 of 4 sites bound (cudnn), saves up to 550 MiB of temp, "
        "predicted 4.0x on those sites, 1 failed, 1 near miss"
    )
    one = RewriteReport(sites=[bound_site()])
    assert one.summary() == (
        "attention: 1 of 1 site bound (cudnn), saves 275 MiB of temp, "
        "predicted 4.0x on that site"
    )
    assert RewriteReport().summary() == "no site matched: the program is unchanged"
    other = bound_site(status="inlined", implementation=None, pattern="norm")
    mixed = RewriteReport(sites=[bound_site(predicted_seconds={}), other])
    assert mixed.summary().endswith("temp; norm: 0 of 1 site bound")


def test_summary_weighs_sites_by_executions() -> None:
    often = bound_site(0, executions=9, predicted_seconds={"xla": 1.0, "cudnn": 0.5})
    once = bound_site(1, predicted_seconds={"xla": 1.0, "cudnn": 1.0})
    assert "predicted 1.8x" in RewriteReport(sites=[often, once]).summary()


def test_findings_and_status() -> None:
    report = full_report()
    assert [site.status for site in report.findings()] == ["near-miss", "failed"]
    assert len(report.with_status("bound")) == 2


def test_text_fits_80_columns_and_is_plain() -> None:
    text = full_report().text()
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii()
    assert str(full_report()) == text
    assert text.replace("\n", "").isprintable()
    assert "\x1b[" in full_report().text(color=True)
    strip = re.compile(r"\x1b\[[0-9;]*m")
    assert strip.sub("", full_report().text(color=True)) == text


def test_text_says_everything() -> None:
    text = full_report().text(width=100)
    for part in (
        "attention.0 x2",
        "bound: cudnn",
        "1.20 ms -> 300 us",
        "B8 T2048 S2048 H16 K4 D128 bfloat16 causal mask scale=0.08839 mask_fill=-inf",
        "verified: 2 of 3 sites within tolerance, largest error 0.001",
        "near miss: attention.90 at model.py:57",
        "first differing operation: stablehlo.select",
        "= got:      probabilities times a random mask",
        "= edit:     call dropout on the output of attention",
        "failed: attention.91",
        "largest error nan, tolerance 0.01. 42 values are not finite.",
        "inlined: attention.92",
        "nothing is faster",
        "online: can not run: runs on cpu only",
        "normalize                   82.1       15012      9120",
        "unchanged",
        "a note",
        "jax 0.11.2",
    ):
        assert part in text


def test_near_miss_shows_the_source_line(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text("def f(p):\n\treturn p * mask\n")
    text = full_report(f"{source}:2").text(width=200)
    assert f" --> {source}:2\n    |\n  2 |     return p * mask\n" in text
    assert "    |     ^^^^^^^^^^^^^^^\n" in text
    missing = full_report(f"{source}.gone:2").text(width=200)
    assert "^" not in missing


def test_equal_sites_fold() -> None:
    sites = [bound_site(i) for i in range(32)] + [bound_site(32, location="b.py:1")]
    groups = fold_sites(sites)
    assert [group.label for group in groups] == ["attention.0 x32", "attention.32"]
    assert groups[0].ids[-1] == "attention.31"
    text = RewriteReport(sites=sites).text()
    assert "attention.0 x32" in text
    assert "attention.7" not in text


def test_long_names_do_not_break_the_table() -> None:
    site = bound_site(location="/a/very/long/path" * 10 + "/model.py:41")
    lines = RewriteReport(sites=[site]).text(width=80).splitlines()
    (row,) = [line for line in lines if line.startswith("  attention.0")]
    assert len(row) <= 80
    assert "model.py:41" in row
    site.id = "jit_a_function_with_a_long_name/attention.0"
    row = RewriteReport(sites=[site]).text(width=80).splitlines()[6]
    assert len(row) <= 80
    assert "_name/attention.0  " in row
    assert "model.py:41" in row


def test_control_characters_do_not_reach_the_terminal() -> None:
    text = RewriteReport(
        module="\x1b[2J",
        sites=[near_miss_site("\x1b]0;x\x07.py:1"), bound_site(reason="\x9b1m")],
        notes=["\r\x1b[1A"],
    ).text()
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.5, "1.50 s"), (0.0123, "12.3 ms"), (3.1e-4, "310 us"), (9.999e-4, "1.00 ms"),
        (4e-8, "40.0 ns"), (0.0, "0.00 ns"), (None, "?"), (math.nan, "?"),
    ],
)  # fmt: skip
def test_seconds(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


def test_bytes_and_locations() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1 << 20, 7 << 39)] == [
        "0 B", "1023 B", "1.00 MiB", "3.50 TiB",
    ]  # fmt: skip
    assert split_location("a:b.py:3") == ("a:b.py", 3)
    assert split_location("a.py:3:9") == ("a.py", 3)
    assert split_location("a.py") == ("a.py", None)


def test_attributes_leave_out_the_usual() -> None:
    usual = {"offset": 0, "softcap": None, "window": (), "precision": ("DEFAULT",) * 2}
    assert describe_attributes(usual) == ""
    assert describe_attributes({"window_left": 7, "softcap": 30.0}) == (
        "window_left=7 softcap=30"
    )
    assert describe_attributes({"score_function": "a tanh of the bias"}) == (
        "own score function"
    )


class _Page(HTMLParser):
    """Collects tags and attributes, and fails on tags that are left open."""

    VOID = ("meta", "br")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_html_is_one_well_formed_file() -> None:
    page = _Page(full_report().html())
    assert page.tags.count("table") == 2
    assert page.tags.count("section") == 1 + 4 + 1 + 1  # sites, details, passes, notes
    for name, value in page.attributes:
        assert name not in ("src", "srcset", "action")
        assert name != "href" or value.startswith("#")
    assert not re.search(r"https?://|url\(|@import", full_report().html())
    assert "probabilities times a random mask" in page.text
    assert "2 of 4 sites bound" in page.text


@given(st.text(max_size=20).map(lambda text: f"</script><img src=x>\"'&{text}"))
def test_html_escapes_everything(evil: str) -> None:
    site = bound_site(
        id=evil, pattern=evil, location=evil, implementation=evil, reason=evil,
        config={evil: evil}, attributes={evil: evil, "dtype": evil},
        predicted_seconds={evil: 1.0, "xla": 2.0},
        candidates=[Candidate(evil, False, evil)],
        near_miss=NearMiss(evil, evil, evil, evil, evil),
        verify=VerifyResult(False, 1.0, 1.0, evil),
    )  # fmt: skip
    report = RewriteReport(
        module=evil, target=evil, sites=[site], versions={evil: evil}, notes=[evil],
        passes=[PassReport(evil, 1.0, 1, 1, True)],
    )  # fmt: skip
    page = _Page(report.html())
    assert page.tags.count("script") == 1
    assert "img" not in page.tags


def test_html_of_an_empty_report() -> None:
    assert "no site matched" in _Page(RewriteReport().html()).text


def test_merge() -> None:
    first, second = full_report(), full_report()
    empty = RewriteReport(module="jit_init", target="h200")
    merged = merge([first, empty, second], "train.py")
    assert merged.module == "train.py"
    assert merged.target == "h200"
    assert [site.id for site in merged.sites[::5]] == [
        "jit_step/attention.0",
        "jit_step#2/attention.0",
    ]
    assert first.sites[0].id == "attention.0"
    assert merged.passes[0] == PassReport("normalize", 0.1642, 30024, 18240, True)
    assert merged.notes[0].startswith("3 modules went through the passes, 2 with")
    check(merged.to_dict(), SCHEMA)
    assert merge([], "train.py").notes == ["no module went through the passes"]


def test_merge_keeps_repeated_passes_apart() -> None:
    twice = [PassReport("cse", 0.1, 9, 8, True), PassReport("cse", 0.2, 8, 8, False)]
    merged = merge([RewriteReport(passes=twice)] * 2, "train.py")
    assert merged.passes == [
        PassReport("cse", 0.2, 18, 16, True),
        PassReport("cse", 0.4, 16, 16, False),
    ]


GRADIENT = {"wanted": ["q", "k", "v", 0], "location": "model.py:60", "bound": True}


def trained_report(**changes) -> RewriteReport:
    sites = [
        bound_site(n, gradient=GRADIENT, recompute_avoided_flops=3 * 10**12)
        for n in range(16)
    ]
    sites[3] = dataclasses.replace(
        sites[3], status="inlined", implementation=None, gradient=None
    )
    return dataclasses.replace(RewriteReport("jit_step", "h200", sites), **changes)


MEASURED = {"baseline_seconds": 0.278, "seconds": 0.2}


def test_gradients_and_gains_survive() -> None:
    report = trained_report(measured=MEASURED)
    data = json.loads(report.to_json(), parse_constant=pytest.fail)
    check(data, SCHEMA)
    back = RewriteReport.from_json(report.to_json())
    assert back.to_dict() == report.to_dict()
    site = back.sites[0]
    assert site.gradient == GRADIENT
    assert site.gradient_bound
    assert not dataclasses.replace(site, status="inlined").gradient_bound
    assert not back.sites[3].gradient_bound
    old = {k: v for k, v in data.items() if k != "measured"}  # an older version's
    for one in old["sites"]:
        del one["gradient"], one["recompute_avoided_flops"]
    assert RewriteReport.from_dict(old).sites[0].recompute_avoided_flops == 0


def test_schema_names_the_new_fields(repo_dir: Path) -> None:
    page = (repo_dir / "docs" / "report_schema.md").read_text()
    for name, value in (("gradient", GRADIENT), ("measured", MEASURED)):
        schema = SCHEMA["$defs"][name]
        assert set(schema["required"]) == set(schema["properties"]) == set(value)
        assert not [field for field in value if f"`{field}`" not in page]


def test_summary_line() -> None:
    report = trained_report()
    assert report.summary_line() == (
        "hlo_tools: 15/16 attention sites bound (15 with gradient) on h200: "
        "predicted 4.00x at those sites, saves up to 4.03 GiB"
    )
    report.measured = MEASURED
    assert report.summary_line().endswith("4.03 GiB; measured 1.39x")
    one = RewriteReport("jit_f", "cpu", [bound_site(), near_miss_site()])
    assert one.summary_line() == (
        "hlo_tools: 1/1 attention site bound on cpu: "
        "predicted 4.00x at that site, saves 275 MiB"
    )
    assert RewriteReport().summary_line() == "hlo_tools: no site bound"
    nothing = RewriteReport(measured={"baseline_seconds": 1.0, "seconds": 0.0})
    assert nothing.summary_line() == "hlo_tools: no site bound: measured ?"
    other = bound_site(pattern="norm", predicted_seconds={}, bytes_saved=0)
    both = RewriteReport(target="cpu", sites=[bound_site(), other])
    assert both.summary_line() == (
        "hlo_tools: 1/1 attention site, 1/1 norm site bound on cpu: saves 275 MiB"
    )


def test_gains_are_shown() -> None:
    report = trained_report(measured=MEASURED)
    text = report.text()
    page = report.html()
    for part in (
        "gradient of q, k, v, side 0 at model.py:60, bound together",
        "3.00 TFLOP",
        "275 MiB",
        "measured: 1.39x (278 ms -&gt; 200 ms)",
    ):
        assert part.replace("&gt;", ">") in text
        assert part in page
    assert max(map(len, text.splitlines())) <= 80
    assert "attention.0 x15" in text  # equal layers still fold
    unbound = dataclasses.replace(bound_site(), gradient={**GRADIENT, "bound": False})
    assert "model.py:60, not bound" in RewriteReport(sites=[unbound]).text()
    plain = RewriteReport(sites=[bound_site()])
    for word in ("gradient", "recomput", "measured"):
        assert word not in plain.text()


def test_merge_keeps_a_measured_gain_that_stands_alone() -> None:
    step, other = trained_report(measured=MEASURED), RewriteReport("jit_init", "h200")
    merged = merge([other, step], "train.py")
    assert merged.measured == MEASURED
    assert merged.sites[0].gradient == GRADIENT
    assert "15/16 attention sites bound (15 with gradient)" in merged.summary_line()
    assert merge([step, trained_report(measured=MEASURED)], "x").measured is None


def test_format_flops() -> None:
    assert format_flops(3e12) == "3.00 TFLOP"
    assert format_flops(12_345_678) == "12.3 MFLOP"
    assert format_flops(999) == "999 FLOP"
