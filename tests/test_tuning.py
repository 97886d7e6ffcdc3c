"""The order explicit, measured, predicted; and the files of measured times."""

import json
import os
from dataclasses import replace

import pytest
from toy_family import TOY, ToyConfig, ToyProblem

from hlo_tools.errors import KernelConfigError, MeasuredTableError, UnsupportedError
from hlo_tools.targets import Target
from pallas_kernels.explanation import explanation_dict, explanation_text
from pallas_kernels.measured import (
    Entry,
    MeasuredTable,
    Sample,
    find_table,
    load_table,
    table_path,
)
from pallas_kernels.tuning import ConfigSelector

H200 = Target.parse("h200")
PROBLEM = ToyProblem(64)
# 64 numbers: 16 blocks at 2, 8 at 3, 4 at 5 microseconds
PREDICTED = ToyConfig(16)
MEASURED = ToyConfig(4, 2)


def table(seconds=1e-6) -> MeasuredTable:
    samples = (
        Sample(ToyConfig(8).to_dict(), seconds=2 * seconds),
        Sample(MEASURED.to_dict(), seconds=seconds),
        Sample(ToyConfig(16).to_dict(), error="out of luck"),
    )
    entries = {TOY.key(PROBLEM): Entry(samples, "wall")}
    return MeasuredTable("toy", "NVIDIA H200", "2026-01-31", {"jax": "0.11.2"}, entries)


@pytest.fixture
def tables(tmp_path):
    table().save(table_path("toy", "NVIDIA H200", tmp_path))
    return tmp_path


def test_predicted_without_a_table(tmp_path) -> None:
    found = ConfigSelector(TOY, H200, tmp_path).select(PROBLEM)
    assert (found.config, found.source) == (PREDICTED, "predicted")
    assert found.prediction.seconds == pytest.approx(21e-6)
    assert "nothing measured" in found.why


def test_measured_before_predicted(tables) -> None:
    selector = ConfigSelector(TOY, H200, tables)
    found = selector.select(PROBLEM)
    assert (found.config, found.source) == (MEASURED, "measured")
    assert "nvidia-h200/toy.json" in found.why
    other = selector.select(ToyProblem(65))
    assert other.source == "predicted"
    assert ConfigSelector(TOY, Target.parse("h100"), tables).table is None


def test_explicit_before_measured(tables) -> None:
    selector = ConfigSelector(TOY, H200, tables)
    for given in (ToyConfig(8), {"block": 8}):
        found = selector.select(PROBLEM, given)
        assert (found.config, found.source) == (ToyConfig(8), "explicit")
    with pytest.raises(KernelConfigError, match="over 16 numbers do not fit"):
        selector.select(PROBLEM, ToyConfig(32))
    with pytest.raises(KernelConfigError, match="ToyConfig"):
        selector.select(PROBLEM, 8)  # type: ignore[arg-type]


def test_measured_that_can_not_run_is_not_taken(tmp_path) -> None:
    entry = Entry((Sample(ToyConfig(32).to_dict(), seconds=1e-9),), "wall")
    stored = replace(table(), entries={TOY.key(PROBLEM): entry})
    stored.save(table_path("toy", "NVIDIA H200", tmp_path))
    found = ConfigSelector(TOY, H200, tmp_path).select(PROBLEM)
    assert (found.config, found.source) == (PREDICTED, "predicted")
    assert "over 16 numbers do not fit" in found.why


def test_nothing_can_run() -> None:
    nothing = replace(TOY, refuse=lambda problem, config, target: "out of order")
    with pytest.raises(UnsupportedError, match="toy can run this on h200: out of ord"):
        ConfigSelector(nothing, H200).select(PROBLEM)


def test_equal_predictions_go_by_the_space() -> None:
    first = TOY.candidates(PROBLEM, H200)
    same = replace(TOY, predict=lambda p, c, t: TOY.predict(p, first[0], t))
    assert ConfigSelector(same, H200).select(PROBLEM).config == first[0]


def test_explanation(tables) -> None:
    found = ConfigSelector(TOY, H200, tables).explain(PROBLEM)
    seconds = [prediction.seconds for _, prediction in found.ranking]
    assert seconds == sorted(seconds)
    text = explanation_text(found, most=1)
    lines = text.splitlines()
    assert lines[0] == "toy on h200: length=64 scale=1.0"
    assert lines[1].startswith("measured: block=4, unroll=2, fast=False; the fastest")
    picked = [line for line in lines if line.startswith("*")]
    assert [line.split()[1:3] for line in picked] == [["4", "2"]]  # beyond `most`
    assert "over 16 numbers do not fit: 32x1xFalse 32x2xFalse" in text
    assert "adds" in text
    assert "(10.0)" in text  # reads of the predicted best: 10 us, all hidden
    assert "\x1b[" in explanation_text(found, color=True)
    values = json.loads(json.dumps(explanation_dict(found)))
    assert values["config"] == MEASURED.to_dict()
    assert len(values["candidates"]) == 6
    assert len(values["refused"]) == 2


def test_table_round_trip(tmp_path) -> None:
    path = table_path("toy", "NVIDIA H100 80GB HBM3", tmp_path)
    assert path.relative_to(tmp_path).as_posix() == "nvidia-h100-80gb-hbm3/toy.json"
    table().save(path)
    assert load_table(path) == table()
    assert os.listdir(path.parent) == ["toy.json"]  # nothing temporary is left


def test_tables_merge() -> None:
    key = TOY.key(ToyProblem(1))
    more = replace(table(1e-7), entries={key: table().entries[TOY.key(PROBLEM)]})
    both = table().merged(more)
    assert set(both.entries) == {key, TOY.key(PROBLEM)}
    assert table(2.0).merged(table()).entries == table().entries
    with pytest.raises(MeasuredTableError, match="NVIDIA H100"):
        table().merged(replace(table(), device_kind="NVIDIA H100"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: "no json", "no JSON"),
        (lambda values: "[]", "schema None"),
        (lambda values: {**values, "schema": 0}, "schema 0, this version reads 1"),
        (lambda values: {**values, "entries": 3}, "malformed"),
        (lambda values: {**values, "entries": {"x": {}}}, "malformed"),
        (lambda values: {**values, "family": "matmul"}, "of matmul on"),
        (lambda values: {**values, "device_kind": "TPU v4"}, "on TPU v4"),
        (lambda values: bad_entry(values, seconds=-1.0), "a time of -1.0 s"),
        (lambda values: bad_entry(values, config={"block": 3}), "the best of"),
        (lambda values: bad_fields(values), "did you mean"),
    ],
)
def test_bad_files_are_named(tables, change, message) -> None:
    path = table_path("toy", "NVIDIA H200", tables)
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(MeasuredTableError, match=message) as caught:
        ConfigSelector(TOY, H200, tables).select(PROBLEM)
    assert str(path) in str(caught.value)


def bad_entry(values, **sample):
    (entry,) = values["entries"].values()
    entry["all"][1].update(sample)
    return values


def bad_fields(values):
    (entry,) = values["entries"].values()
    entry["all"][1]["config"] = entry["config"] = {"block": 4, "unrolls": 2}
    return values


def test_no_file_is_no_error(tmp_path) -> None:
    assert find_table(TOY, "NVIDIA H200", tmp_path) is None
