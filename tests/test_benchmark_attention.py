"""`benchmarks/attention.py` on tiny rows: it tells wrong from right."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SLOW = pytest.mark.slow


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention

    return attention


def run(script, tmp_path, *options: str) -> tuple[int, dict]:
    """Returns the exit code, and what was written."""
    path = tmp_path / "out.json"
    fixed = ["--sizes", "small", "--seed", "0", "--rounds", "2", "--seconds", "0.001"]
    code = script.main([*fixed, "--output", str(path), *options])
    return code, json.loads(path.read_text())


def test_a_row_has_all_figures(script, tmp_path, capsys) -> None:
    code, record = run(script, tmp_path, "--rows", "D64 B4 S4096 H16 causal")
    assert code == 0
    assert record["platform"] == "cpu"
    assert record["versions"]["jax"] == jax.__version__
    (row,) = record["rows"]
    assert list(row["implementations"]) == ["online", "reference", "xla"]
    for cells in row["implementations"].values():
        for part, results in (("forward", 1), ("both", 4)):
            cell = cells[part]
            assert cell["status"] == "measured"
            assert len(cell["errors"]) == results
            assert all(0 < x < cell["limits"][n] for n, x in cell["errors"].items())
            assert len(cell["ms_of_rounds"]) == 2
            assert min(cell["ms_of_rounds"]) <= cell["ms"]
            assert cell["timer"] == "wall"
            xla = row["implementations"]["xla"][part]
            assert cell["speed_over_xla"] == pytest.approx(xla["ms"] / cell["ms"])
            # B, S, H, K, D = 2, 128, 4, 4, 16, and half of it
            count = 4 * 2 * 4 * 128**2 * 16 / 2 * (3.5 if part == "both" else 1)
            assert cell["tflops"] == pytest.approx(count / cell["ms"] / 1e9)
    assert "Forward and backward" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    ["bias + dbias", *(pytest.param(name, marks=SLOW) for name in
     ("segments causal", "window 512 causal", "mask", "key mask", "bias", "S1000",
      "grouped K4 causal", "D96 causal", "float16 causal", "S1000 causal"))],
)  # fmt: skip
def test_features(script, tmp_path, name: str) -> None:
    options = ("--features", "--only", "online", "--rounds", "1")
    code, record = run(script, tmp_path, "--rows", name, *options)
    assert code == 0
    cells = record["rows"][0]["implementations"]["online"]
    assert {cell["status"] for cell in cells.values()} == {"measured"}
    assert ("dbias" in cells["both"]["errors"]) == (name == "bias + dbias")


def test_what_an_interface_has_no_form_for(script, tmp_path, capsys) -> None:
    options = ("--features", "--rows", "softcap causal", "--only", "xla,mosaic-gpu")
    code, record = run(script, tmp_path, *options)
    found = record["rows"][0]["implementations"]["xla"]["forward"]
    assert found["status"] == "refused"
    assert "has no softcap" in found["reason"]
    assert "has no softcap" in capsys.readouterr().out
    # Ours broke: a kernel for GPUs that nothing interprets is no refusal.
    assert code == 1
    broke = record["rows"][0]["implementations"]["mosaic-gpu"]["forward"]
    assert broke["status"] == "failed"


def test_what_is_not_installed_is_skipped(script, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokamax", None)
    options = ("--rows", "D64 B4 S4096 H16 full", "--only", "tokamax")
    code, record = run(script, tmp_path, *options)
    assert code == 0
    cell = record["rows"][0]["implementations"]["tokamax"]["both"]
    assert cell["status"] == "skipped"
    assert "can not be imported" in cell["reason"]
    assert "ms" not in cell


def test_what_does_not_fit_is_skipped(script, tmp_path, monkeypatch) -> None:
    import attention_measuring

    monkeypatch.setattr(attention_measuring, "memory_bytes", lambda: 1 << 16)
    options = ("--rows", "D64 B4 S4096 H16 full", "--only", "xla")
    code, record = run(script, tmp_path, *options)
    assert code == 0
    cell = record["rows"][0]["implementations"]["xla"]["both"]
    assert cell["status"] == "skipped"
    assert cell["reason"].endswith("GiB of memory, of 0.0")


@functools.cache
def checked_row():
    """Returns a small row, its arrays, right results, and the check of them."""
    from attention_exact import errors
    from attention_measuring import program
    from attention_rows import MAIN, arrays, small

    row = small(next(row for row in MAIN if row.name == "D64 B4 S4096 H16 causal"))
    given = arrays(row, 0)
    right = jax.jit(program(row, "xla", "both"))(given)
    return row, given, right, jax.jit(functools.partial(errors, row))


# name -> result, and what is done to it: each is a mistake of a kernel's making
MISTAKES = {
    "one element": ("out", lambda x: x.at[1, 90, 3, 5].add(0.2)),
    "a head": ("out", lambda x: x.at[:, :, 3].set(x[:, :, 2])),
    "the last row": ("out", lambda x: x.at[:, 127:].set(0)),
    "not a number": ("out", lambda x: x.at[0, 0, 0, 0].set(jnp.nan)),
    "scaled": ("out", lambda x: x * 1.02),
    "scaled gradient": ("dk", lambda x: x * 1.03),
    "a tile is missing": ("dq", lambda x: x.at[0, 64:128, 0].set(0)),
    "infinite": ("dv", lambda x: x.at[0, 0, 0, 0].set(jnp.inf)),
}


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_mistakes_are_found(mistake: str | None) -> None:
    from attention_measuring import Cell, judge

    row, given, found, check = checked_row()
    cell, name = Cell(), None
    if mistake is not None:
        name, change = MISTAKES[mistake]
        found = found | {name: change(found[name])}
    judge(row, cell, check, given, found)
    assert cell.status == ("measured" if name is None else "wrong")
    assert cell.reason.startswith("" if name is None else f"{name} is off by")
    assert cell.reason.count("off by") == (name is not None)


def test_wrong_is_marked(script, tmp_path, monkeypatch, capsys) -> None:
    import attention_contenders

    right = attention_contenders.CONTENDERS["xla"]

    def wrong(row, arrays):
        k = arrays["k"]
        k = 1.03 * k - jax.lax.stop_gradient(0.03 * k)
        return right.call(row, arrays | {"k": k.astype(arrays["k"].dtype)})

    monkeypatch.setitem(
        attention_contenders.CONTENDERS, "xla", dataclasses.replace(right, call=wrong)
    )
    options = ("--rows", "D64 B4 S4096 H16 full", "--only", "xla")
    code, record = run(script, tmp_path, *options)
    assert code == 1
    cells = record["rows"][0]["implementations"]["xla"]
    assert cells["forward"]["status"] == "measured"
    assert cells["both"]["reason"].startswith("dk is off by")
    assert "ms" not in cells["both"]
    assert "WRONG" in capsys.readouterr().out


def test_rows_are_those_that_the_readme_quotes(script) -> None:
    from attention_rows import FEATURES, MAIN

    assert len({row.name for row in (*MAIN, *FEATURES)}) == len(MAIN) + len(FEATURES)
    sizes = {(x.batch, x.length, x.heads, x.depth, x.causal) for x in MAIN}
    assert {(2, 8192, 16, 128, True), (4, 2048, 16, 128, False)} < sizes
    with pytest.raises(SystemExit, match="no \\['nothing'\\]"):
        script.main(["--rows", "nothing"])
    with pytest.raises(SystemExit, match="no \\['nothing'\\]"):
        script.main(["--only", "nothing"])
