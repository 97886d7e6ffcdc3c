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


def test_training_recall(capsys):
    """Forward, recomputed and backward sites of the training entries."""
    found, total, missing = [0, 0], [0, 0], []
    for row in ROWS:
        if row["kind"] != "train" or row["dropout"] or row["decoy"]:
            continue
        sites = row["attention_sites"]
        want = [sites["forward"] + sites["recomputed"], sites["backward"]]
        text = outline(load(row))[0].as_text()
        got = [
            text.count(f'stablehlo.composite "hlo_tools.{name}"')
            for name in ("attention", "attention_grad")
        ]
        found = [a + b for a, b in zip(found, got, strict=True)]
        total = [a + b for a, b in zip(total, want, strict=True)]
        if want != got:
            missing.append((row["name"], want, got))
    with capsys.disabled():
        print(
            f"\nzoo, training: {found[0]}/{total[0]} forward and recomputed, "
            f"{found[1]}/{total[1]} backward sites outlined"
        )
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


# One of each kind of training program; the slow tier has them all.
SOME = (
    "jaxnn_causal_bf16_train",
    "linen_lm_scan_remat_train",
    "hand_gqa_grouped_einsum_train",
    "hand_softcap_train",
    "nnx_dpa_bias_trained_train",
    "jaxnn_scan_train",
)


@pytest.mark.parametrize("row", [r for r in rows(("train",)) if r.id in SOME])
def test_some_train_values(row, monkeypatch):
    bind_everything(monkeypatch)
    check_values(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(("train",)))
def test_each_pair_against_its_own_original(row, monkeypatch):
    """Compares each site's value and gradients themselves, not what an update hides."""
    bind_everything(monkeypatch)
    module = StableHloModule.parse(load(row))
    cpu = Target.parse("cpu")
    _, report = run_passes(module, "default", cpu, verify=True)
    assert all(site.verify is not None and site.verify.passed for site in report.sites)


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
    if not row["decoy"]:
        escapes = row["probs_escape"] and row["kind"] != "train"
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


FMHA = SHARED / "corpora" / "fmha_recall"
FMHA_ROWS = json.loads((FMHA / "index.json").read_text()) if ROWS else []
# A gradient that is none of this forward pass, and an intermediate that is returned:
# cuDNN's own rewriter left them alone too.
FMHA_LEFT = (
    "F16InvalidTrainingBmm1ScaleBiasMaskSoftmaxBmm2ShouldNotBeLowered",
    "F16TrainingBmm2Grad1IncorrectPattern",
)


def fmha_rows(kind):
    return [
        pytest.param(row, id=row["name"])
        for row in FMHA_ROWS
        if row["kind"] == kind and row["attention"] and not row["dropout"]
    ]


def test_fmha_corpus(capsys):
    """Every forward module with an attention and no reason against it."""
    wrong, found = [], 0
    for row in FMHA_ROWS:
        text = (FMHA / f"{row['name']}.mlir").read_text()
        got = sites_found(text)
        want = int(row["attention"] and not row["dropout"])
        if row["kind"] == "forward" or not row["attention"]:
            found += got
            if got != want:
                wrong.append((row["name"], want, got))
    with capsys.disabled():
        print(f"\nfmha_recall: {found} forward attention modules outlined")
    assert not wrong


@pytest.mark.parametrize("row", fmha_rows("forward and backward"))
def test_fmha_training(row, monkeypatch):
    bind_everything(monkeypatch)
    text = (FMHA / f"{row['name']}.mlir").read_text()
    cpu = Target.parse("cpu")
    module, report = run_passes(StableHloModule.parse(text), "default", cpu)
    module.verify()
    (site,) = report.sites
    left = row["name"] in FMHA_LEFT
    assert site.status == ("inlined" if left else "bound"), site.reason
    if not left:
        assert {"q", "k", "v"} <= set(site.gradient["wanted"])


@pytest.mark.slow
@pytest.mark.parametrize("row", fmha_rows("forward and backward"))
def test_fmha_training_values(row, monkeypatch):
    bind_everything(monkeypatch)
    text = (FMHA / f"{row['name']}.mlir").read_text()
    cpu = Target.parse("cpu")
    module, _ = run_passes(StableHloModule.parse(text), "default", cpu)
    assert_same_values(text, module.as_text())
