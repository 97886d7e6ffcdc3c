"""Measuring, scoring, and the command line and scripts around them."""

import importlib.util
import json
import math
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from toy_family import TOY, ToyConfig, ToyProblem

from hlo_tools import cli
from hlo_tools.errors import MeasuredTableError
from hlo_tools.targets import Target
from pallas_kernels import families, scoring
from pallas_kernels.attention.gpu_family import FORWARD
from pallas_kernels.measured import Entry, MeasuredTable, Sample, load_table
from pallas_kernels.measuring import measure, tune
from pallas_kernels.timing import Timing, time_call

CPU = Target.from_devices(jax.devices()[:1])
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "toy", "toy_family:TOY")


def by_block(fn, *arrays) -> Timing:
    """A timer that runs the function and takes its word for nothing."""
    jax.block_until_ready(fn(*arrays))
    return Timing(1e-6 * arrays[0].size, "profiler")


def test_wall_clock_says_so() -> None:
    x = jnp.ones((400, 400))
    small, large = (
        time_call(
            lambda x, n=n: jax.lax.fori_loop(0, n, lambda i, y: y @ x / 400, x), x
        )
        for n in (1, 30)
    )
    assert small.timer == large.timer == "wall"
    assert "cpu: wall clock" in small.note
    assert 0 < small.seconds < large.seconds


def test_what_fails_is_kept_with_its_reason() -> None:
    entry, notes = measure(TOY, ToyProblem(64), CPU, timer=by_block)
    assert entry is not None
    assert notes == []
    assert len(entry.samples) == 6  # the candidates
    failed = [sample for sample in entry.samples if sample.error]
    assert {sample.config["unroll"] for sample in failed} == {2}
    assert {sample.error for sample in failed} == {"ValueError: no unrolling"}
    assert entry.best.config == ToyConfig(4).to_dict()  # the first of equals


def test_times_of_two_kinds_are_not_compared() -> None:
    kinds = iter(["wall", "profiler", "wall"])
    entry, notes = measure(
        TOY,
        ToyProblem(64),
        CPU,
        timer=lambda fn, x: (fn(x), Timing(1.0, next(kinds)))[1],
    )
    assert entry is None
    assert "mixed" in notes[0]


def test_tune_keeps_what_is_done(tmp_path) -> None:
    """A second problem that stops everything does not lose the first."""
    path, told = tmp_path / "deep" / "toy.json", []

    def stop_at_second(fn, x):
        if x.size == 16:
            raise KeyboardInterrupt
        return by_block(fn, x)

    problems = ToyProblem(64), ToyProblem(16)
    with pytest.raises(KeyboardInterrupt):
        tune(TOY, problems, CPU, path, timer=stop_at_second)
    assert list(load_table(path).entries) == [TOY.key(problems[0])]
    table, notes = tune(
        TOY, problems[1:], CPU, path, lambda *a: told.append(a), by_block
    )
    assert list(table.entries) == [TOY.key(problems[1])]
    assert len(load_table(path).entries) == 2
    assert notes == []
    assert [done for done, _, _ in told] == list(range(7))
    assert {total for _, total, _ in told} == {6}
    with pytest.raises(MeasuredTableError):
        tune(TOY, problems, Target.parse("h200"), path, timer=by_block)


def test_processes_measure_as_one(toy, tmp_path) -> None:
    problems, told = (ToyProblem(64), ToyProblem(1)), []
    table, notes = tune(
        TOY, problems, CPU, tmp_path / "toy.json", lambda *a: told.append(a), workers=2
    )
    alone, _ = measure(TOY, problems[0], CPU)
    assert alone is not None
    for entry in table.entries.values():
        assert entry.timer == "wall"
    entry = table.entries[TOY.key(problems[0])]
    for one, other in zip(entry.samples, alone.samples, strict=True):
        assert (one.config, one.error) == (other.config, other.error)
    assert len(table.entries) == 2
    assert [done for done, _, _ in told] == list(range(len(told)))
    assert any("dispatch included" in note for note in notes)


def toy_table(*rows) -> MeasuredTable:
    """Of (length, {block: seconds or None}); the model likes block 16 best."""
    entries = {}
    for length, times in rows:
        samples = (
            Sample(ToyConfig(block).to_dict(), seconds, None if seconds else "broken")
            for block, seconds in times.items()
        )
        entries[TOY.key(ToyProblem(length))] = Entry(tuple(samples), "wall")
    return MeasuredTable("toy", "cpu", "2026-01-31", {}, entries)


def test_scores() -> None:
    table = toy_table(
        (64, {4: 3.0, 8: 2.0, 16: 2.0}), (65, {4: 1.0, 8: 2.0, 16: 4.0}),
        (66, {4: 1.0, 16: None}),
    )  # fmt: skip
    first, second, third = scoring.score(TOY, table, CPU)
    assert (first.ratio, first.rank, first.tried) == (1.0, 1, 3)
    assert (second.ratio, second.rank) == (4.0, 3)
    assert second.picked == ToyConfig(16)
    assert second.best == ToyConfig(4)
    assert second.predicted_over_measured == pytest.approx(26e-6 / 4)
    assert math.isinf(third.ratio)
    total = scoring.summarize([first, second])
    assert (total.mean, total.worst, total.exact) == (pytest.approx(2.0), 4.0, 1)
    total = scoring.summarize([first, second, third])
    assert (total.mean, total.failed) == (pytest.approx(2.0), 1)
    assert math.isinf(total.worst)
    values = json.loads(json.dumps(scoring.scores_dict([second, third], TOY.key)))
    assert values["worst"] is None
    assert values["rows"][0]["ratio"] == 4.0
    with pytest.raises(MeasuredTableError):
        scoring.score(FORWARD, table, CPU)


def test_command_measures_and_scores(toy, tmp_path, capsys) -> None:
    path = tmp_path / "toy.json"
    problems = tmp_path / "problems.json"
    problems.write_text(json.dumps([{"length": 24}, {"length": 32, "scale": 2.0}]))
    given = ["tune", "toy", "--problems", str(problems), "--output", str(path)]
    assert cli.main([*given, "--format", "json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["problems"] == 2
    assert "2 of 2 problems" in output.err
    assert "wall clock" in output.err
    keys = {TOY.key(ToyProblem(24)), TOY.key(ToyProblem(32, scale=2.0))}
    assert set(load_table(path).entries) == keys
    assert cli.main(["tune", "toy", "-o", str(path)]) == 0  # the preset, added
    assert len(load_table(path).entries) == 4
    capsys.readouterr()
    assert cli.main(["tune", "toy", "--score", str(path)]) == 0
    assert "4 problems: geometric mean" in capsys.readouterr().out


def test_command_finds_what_can_not_run(toy, tmp_path, capsys) -> None:
    problems = tmp_path / "problems.json"
    problems.write_text(json.dumps([{"length": 0}, {"length": 8}]))
    given = ["tune", "toy", "--problems", str(problems), "-o", str(tmp_path / "t.json")]
    assert cli.main(given) == 1
    assert 'no configuration can run {"length":0}' in capsys.readouterr().err


def test_command_explains(capsys) -> None:
    given = ["tune", "attention-forward", "--device", "h200", "--explain"]
    assert cli.main([*given, "grid:2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("attention-forward on h200: batch=32 q_len=512")
    assert "tensor cores" in text
    assert "registers a thread" in text
    problem = FORWARD.key(FORWARD.presets["grid"]()[2])
    assert cli.main([*given, problem, "--format", "json"]) == 0
    values = json.loads(capsys.readouterr().out)
    best = values["candidates"][0]
    assert values["config"] == best["config"]
    exposed = sum(term["exposed"] for term in best["terms"])
    assert exposed == pytest.approx(best["seconds"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention-forwards"], "did you mean attention-forward"),
        (["attention-forward", "--explain", "gird:1"], "did you mean grid"),
        (["attention-forward", "--explain", "small:9"], "give small:0 to small:1"),
        (["attention-forward", "--explain", '{"batch":1}'], "no AttentionProblem"),
        (["attention-forward", "--explain", "small:0"], "for Hopper GPUs, not cpu"),
        (["attention-forward", "--score", "nowhere.json"], "nowhere.json: No such"),
        (["attention-forward", "--problems", "nowhere.json"], "nowhere.json: No such"),
        (["attention-forward", "--device", "h200"], "not at hand: here is cpu"),
        (["attention-forward"], "nothing was measured on cpu"),
        (["x", "--score", "a", "--explain", "b"], "not both"),
    ],
)
def test_command_says_what_is_wrong(arguments, message, capsys) -> None:
    assert cli.main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_score_selector_fits_and_scores(tmp_path, monkeypatch, capsys) -> None:
    """Times that the model itself makes with other constants: no pick is worse."""
    script = load_script("score_selector")
    target = Target.parse("h200")
    constants = script.gpu_family.CONSTANTS
    before = dict(constants)
    constants.update(tensor_efficiency=0.6, tile_cycles=500.0)
    entries = {}
    for problem in FORWARD.presets["grid"]()[:12:3]:
        samples = (
            Sample(c.to_dict(), FORWARD.predict(problem, c, target).seconds)
            for c in FORWARD.candidates(problem, target)
        )
        entries[FORWARD.key(problem)] = Entry(tuple(samples), "profiler")
    constants.update(before)
    table = MeasuredTable(FORWARD.name, "NVIDIA H200", "2026-01-31", {}, entries)
    path, output = tmp_path / "table.json", tmp_path / "scores.json"
    table.save(path)
    command = ["score_selector.py", str(path), "--output", str(output), "--fit"]
    monkeypatch.setattr("sys.argv", command)
    try:
        assert script.main() == 0
    finally:
        constants.update(before)
    assert json.loads(output.read_text())[str(path)]["worst"] < 1.01
    assert "tensor_efficiency" in capsys.readouterr().out


def test_selector_crosscheck_reads_a_wheel(tmp_path, monkeypatch) -> None:
    script = load_script("selector_crosscheck")
    causal = {"causal_mask": {"offset": 0, "window_size": None}, "bool_mask": None}
    key = {
        "q": "bf16[2,8192,32,64]", "k": "bf16[2,8192,8,64]", "v": "bf16[2,8192,8,64]",
        "logits_scale": 0.125, "logits_soft_cap": None, "bias": None, "mask": causal,
    }  # fmt: skip
    problem = script.parse_problem(json.dumps(key))
    assert (problem.q_len, problem.group, problem.causal) == (8192, 4, True)
    with pytest.raises(ValueError, match="rank 4"):
        script.parse_problem(json.dumps({**key, "q": "bf16[8192,32,64]"}))
    with pytest.raises(ValueError, match="another form"):
        script.parse_problem(json.dumps({**key, "mask": {"q_start": "i32[2]"}}))
    forward = {"block_q": 128, "block_kv": 128, "num_stages": 3}
    backward = {
        "block_q_dkv": 64, "block_kv_dkv": 64, "block_q_dq": 64, "block_kv_dq": 64,
        "num_stages": 2, "compute_wgs": 2,
    }  # fmt: skip
    wheel, output = tmp_path / "tokamax.whl", tmp_path / "found.json"
    with zipfile.ZipFile(wheel, "w") as archive:
        for kind, config in (("forward", forward), ("backward", backward)):
            times = {json.dumps(config): {"evaluation_times_ms": [1.0, 2.0, 3.0]}}
            text = json.dumps({json.dumps(key): times})
            archive.writestr(f"{script.FOLDER}/{script.KINDS[kind]}", text)
    rows, _ = script.read_rows("forward", script.read_tables(str(wheel))["forward"])
    assert rows == [script.Row(problem, (((128, 128, 3), 2e-3),), True)]
    (found,) = script.compare("forward", rows, script.default_constants())
    order = script.space("forward", problem)
    assert found["ours"] in order
    assert (128, 128, 3) in order
    assert found["rule"] == (64, 128, 2)
    assert not found["rule_hit"]
    monkeypatch.setattr(
        "sys.argv", ["x", "--wheel", str(wheel), "--output", str(output)]
    )
    assert script.main() == 0
    values = json.loads(output.read_text())
    assert values["backward"]["summary"]["paper"]["rule_hits"] == 1
    assert "stored" not in values["forward"]["rows"][0]
