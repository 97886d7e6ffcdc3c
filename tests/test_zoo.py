"""Recall and exactness on public models (skipped without the shared data)."""

import json
import os
from pathlib import Path

import pytest
from zoo_tools import assert_same_values, results_of

from hlo_tools import StableHloModule
from hlo_tools.driver import run_passes
from hlo_tools.targets import Target

SHARED = Path(os.environ.get("HLO_TOOLS_SHARED", Path(__file__).parents[2] / "shared"))
INDEX = SHARED / "zoo" / "index.json"
ROWS = json.loads(INDEX.read_text()) if INDEX.exists() else []
OUTLINE = "normalize,outline-attention"

pytestmark = pytest.mark.skipif(not ROWS, reason=f"no zoo at {INDEX.parent}")


def rows(kinds, decoys=False):
    return [
        pytest.param(row, id=row["name"])
        for row in ROWS
        if row["kind"] in kinds and bool(row["decoy"]) == decoys and not row["dropout"]
    ]


def load(row):
    return (SHARED / "zoo" / row["file"]).read_text()


def outline(text):
    return run_passes(StableHloModule.parse(text), OUTLINE, Target.parse("cpu"))


def outline_only(text):
    passes = "inline-calls,cse,dce,outline-attention"
    return run_passes(StableHloModule.parse(text), passes, Target.parse("cpu"))


def sites_found(text):
    module, _ = outline(text)
    return module.as_text().count('stablehlo.composite "hlo_tools.attention"')


def test_recall(capsys):
    found, total, missing = 0, 0, []
    for row in ROWS:
        if row["kind"] in ("forward", "decode") and not row["dropout"]:
            want, got = row["attention_sites"]["forward"], sites_found(load(row))
            total, found = total + want, found + got
            if want != got:
                missing.append((row["name"], want, got))
    with capsys.disabled():
        print(f"\nzoo: {found}/{total} forward and decode sites outlined")
    assert not missing


def test_no_decoy_is_outlined():
    wrong = [row["name"] for row in ROWS if row["decoy"] and sites_found(load(row))]
    assert not wrong


def test_dropout_is_a_near_miss_with_its_reason():
    for row in ROWS:
        if row["dropout"] and row["kind"] == "forward":
            _, report = outline(load(row))
            (site,) = report.sites
            assert site.status == "near-miss", row["name"]
            assert "dropout" in site.reason


def test_near_misses_are_reported_for_near_miss_decoys():
    for row in ROWS:
        if row["decoy"] and row["decoy"].startswith("near miss"):
            _, report = outline(load(row))
            assert [s.status for s in report.sites] == ["near-miss"], row["name"]
            assert report.sites[0].near_miss.edit


@pytest.mark.parametrize("row", rows(("forward", "decode")))
def test_forward_values(row, monkeypatch):
    bind_everything(monkeypatch)
    check_values(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(("train",)) + rows(("train", "forward"), True))
def test_train_and_decoy_values(row, monkeypatch):
    bind_everything(monkeypatch)
    check_values(row)


def bind_everything(monkeypatch):
    """Binds every site that can be bound, whatever the cost model says."""
    monkeypatch.setattr("hlo_tools.binding.FASTER", float("inf"))


def check_values(row):
    text = load(row)
    outlined, _ = outline(text)
    outlined.verify()
    module, report = run_passes(
        StableHloModule.parse(text), "default", Target.parse("cpu")
    )
    module.verify()
    if row["kind"] != "train" and not row["decoy"]:
        escapes = row["probs_escape"]
        wanted = "inlined" if escapes else "bound"
        assert {site.status for site in report.sites} == {wanted}
    assert_undone_exactly(text)
    assert_same_values(text, module.as_text())


def assert_undone_exactly(text):
    """Outlining moves operations: inlined again, they are the original ones."""
    cpu = Target.parse("cpu")
    before, _ = run_passes(StableHloModule.parse(text), "inline-calls,cse,dce", cpu)
    after, _ = outline_only(text)
    run_passes(after, "inline-composites,cse,dce", cpu)
    assert results_of(before.main) == results_of(after.main)


def test_fmha_corpus(capsys):
    """Every forward module with an attention and no reason against it."""
    folder = SHARED / "corpora" / "fmha_recall"
    wrong, found = [], 0
    for row in json.loads((folder / "index.json").read_text()):
        text = (folder / f"{row['name']}.mlir").read_text()
        got = sites_found(text)
        want = int(row["attention"] and not row["dropout"])
        if row["kind"] == "forward" or not row["attention"]:
            found += got
            if got != want:
                wrong.append((row["name"], want, got))
    with capsys.disabled():
        print(f"\nfmha_recall: {found} forward attention modules outlined")
    assert not wrong
