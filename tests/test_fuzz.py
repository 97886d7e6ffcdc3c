"""Fuzzed programs: whatever the passes do to them, values and gradients stay equal.

`benchmarks/fuzz_attention.py` runs the same cases by the thousand.
"""

import collections
import subprocess
import sys

import fuzz_programs
import jax
import numpy as np
import pytest
from fuzz_case import CHOICES, Case, cases, random_case, repaired, simplified
from fuzz_check import check, execute, interpret, lowered, rewritten
from fuzz_reproducer import reproducer
from hypothesis import HealthCheck, given, settings

import hlo_tools

# Not the benchmark's: the two look at different programs.
SEED = 20_000
FAST_CHUNKS, SLOW_CHUNKS, CHUNK = 8, 60, 18


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr("hlo_tools.binding.FASTER", float("inf"))


def check_chunk(chunk: int) -> collections.Counter:
    """Checks the programs of a chunk; returns how many had which status."""
    counts: collections.Counter = collections.Counter()
    wrong = []
    for number in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        verdict = check(random_case(SEED, number))
        if verdict.wrong:
            wrong.append(f"{verdict.case!r}: {verdict.wrong}")
        counts.update({*verdict.statuses})
    assert not wrong, "\n".join(wrong)
    return counts


@pytest.mark.parametrize("chunk", range(FAST_CHUNKS))
def test_equal(chunk):
    assert check_chunk(chunk)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(FAST_CHUNKS, SLOW_CHUNKS))
def test_equal_more(chunk):
    assert check_chunk(chunk)


def drawn(examples: int):
    """Settings of a test that draws with Hypothesis; it shrinks what it finds."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        # everything stays bound from one example to the next
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@drawn(12)
@given(cases())
def test_equal_as_hypothesis_draws(case):
    assert not check(case).wrong


@pytest.mark.slow
@drawn(200)
@given(cases())
def test_equal_as_hypothesis_draws_more(case):
    assert not check(case).wrong


def test_most_attention_is_bound():
    """Where nothing is bound, programs are compared with themselves."""
    drawn = (random_case(SEED, number) for number in range(150))
    forward = [c for c in drawn if not c.mutated and not c.differentiated]
    reports = [rewritten(lowered(case)[0])[1] for case in forward]
    bound = [r for r in reports if any(s.status == "bound" for s in r.sites)]
    assert len(bound) > len(forward) / 2


# ------------------------------------------------------- the suite finds what is wrong

PLAIN = Case(q_len=5, k_len=7, kv_heads=2, head_dim=4, seed=5)


def sabotaged(monkeypatch, change):
    """Lets the passes return a text that differs from theirs."""
    monkeypatch.setattr("fuzz_check.rewritten", change)


@pytest.mark.parametrize(
    "case",
    [
        PLAIN,
        PLAIN.but(dtype="float64"),
        PLAIN.but(dtype="bfloat16"),
        PLAIN.but(dtype="float16"),
        PLAIN.but(mode="grad", mask="causal_iota", bias="hts"),
        PLAIN.but(mode="grad", dtype="bfloat16", seed=4),
    ],
    ids=repr,
)
def test_another_scale_is_wrong(case, monkeypatch):
    def change(text, passes):
        other, _ = lowered(case.but(scale="on_k", norm="l2"))
        return other, rewritten(text, passes)[1]

    assert not check(case).wrong
    sabotaged(monkeypatch, change)
    assert "error" in check(case).wrong


def test_another_backward_is_wrong(monkeypatch):
    case = PLAIN.but(mode="value_and_grad", backward="core_exact", softmax="stable")

    def change(text, passes):
        other, _ = lowered(case.but(backward="core_flash_no_delta"))
        return other, rewritten(text, passes)[1]

    assert not check(case).wrong
    sabotaged(monkeypatch, change)
    assert "error" in check(case).wrong


def test_lost_nan_is_wrong(monkeypatch):
    case = PLAIN.but(mask="sparse_rows", fill="-inf", k_len=2, q_len=9)

    def change(text, passes):
        other, _ = lowered(case.but(fill="-1e30"))
        return other, rewritten(text, passes)[1]

    text, inputs = lowered(case)
    assert np.isnan(interpret(text, inputs)[0]).any()
    sabotaged(monkeypatch, change)
    assert "NaN" in check(case).wrong


def test_crash_of_a_pass_is_wrong(monkeypatch):
    def change(text, passes):
        raise KeyError("no such value")

    sabotaged(monkeypatch, change)
    assert "KeyError" in check(PLAIN).wrong


# ------------------------------------------------------------------- the suite itself


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["value", "grad"])
def test_interpreter_agrees_with_xla(dtype, mode):
    case = PLAIN.but(dtype=dtype, mode=mode, loop="scan", mask="valid", k_len=0)
    text, inputs = lowered(case)
    both = [execute(text, inputs, compiled) for compiled in (False, True)]
    tolerance = {"float32": 2e-6, "float64": 1e-13, "bfloat16": 4e-2, "float16": 5e-3}
    for one, two in zip(*both, strict=True):
        one, two = (np.asarray(x).astype(np.float64) for x in (one, two))
        limit = tolerance[dtype] * np.abs(two).max()
        np.testing.assert_allclose(one, two, rtol=0, atol=limit)


def test_same_number_same_case():
    assert random_case(3, 14) == random_case(3, 14)
    assert len({random_case(3, n) for n in range(50)}) == 50


def test_repr_replays():
    for number in range(50):
        case = random_case(4, number)
        assert eval(repr(case)) == case


def test_every_choice_is_drawn():
    """No choice is repaired away wherever it is drawn."""
    drawn = [random_case(5, number) for number in range(6000)]
    for name, options in CHOICES.items():
        if name != "seed":
            missing = {*options} - {getattr(case, name) for case in drawn}
            assert not missing, name


def test_repair_is_stable():
    for number in range(300):
        case = random_case(6, number)
        assert repaired(case) == case


def test_most_cases_are_attention():
    drawn = [random_case(7, number) for number in range(2000)]
    assert 0.5 < sum(not case.mutated for case in drawn) / len(drawn) < 0.8


def test_simplified_keeps_what_fails():
    case = random_case(8, 0).but(softmax="late", mask="band")
    small = simplified(case, lambda c: (c.softmax, c.mask) == ("late", "band"))
    assert small == Case(softmax="late", mask="band")


@pytest.mark.parametrize("number", range(4))
def test_jit_gives_the_same(number):
    """Through the decorator, as a user runs it."""
    case = Case(seed=number, q_len=6, kv_heads=2, head_dim=4, mask="causal_tril")
    case = case.but(softmax=("jax", "late", "reciprocal", "lse")[number])
    function, arrays = fuzz_programs.build(case)
    staged = hlo_tools.jit(function)
    got, want = staged(arrays), jax.jit(function)(arrays)
    assert [site.status for site in staged.report().sites] == ["bound"]
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_reproducer_runs(tmp_path, repo_dir):
    case = PLAIN.but(mask="valid", dtype="bfloat16")
    script = tmp_path / "reproducer.py"
    script.write_text(reproducer(case, "nothing, this is a test"))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=repo_dir, capture_output=True, text=True,
        env={"PYTHONPATH": str(repo_dir), "JAX_PLATFORMS": "cpu", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout
