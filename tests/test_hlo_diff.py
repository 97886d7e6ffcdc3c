"""Diffs of the corpus's pairs, of small programs, and baselines."""

import json
import re
import time

import jax
import jax.numpy as jnp
import pytest
from hlo_corpus import ROOT, needs_corpus, pairs

from hlo_tools.cli import main
from hlo_tools.hlo import parse
from hlo_tools.hlo.diff import diff


@needs_corpus
@pytest.mark.parametrize("pair", pairs(), ids=lambda p: f"{p['a']}-{p['b']}"[6:])
def test_pairs(pair):
    result, expected = diff(ROOT / pair["a"], ROOT / pair["b"]), pair["expected"]
    assert result.kind == expected["diff"]
    if "places" in expected:
        assert result.place_count == expected["places"]
    if "where" in expected:
        assert any(re.search(expected["where"], name) for name in result.where)
    assert result.replaced == expected.get("replaced", result.replaced)
    assert result.dimensions == expected.get("dimensions", result.dimensions)
    inserted = expected.get("inserted_parameters", result.inserted_parameters)
    assert result.inserted_parameters == inserted


@needs_corpus
def test_large_scheduled_modules_are_quick():
    a, b = (parse(ROOT / f"own/{n}_gpt_train.hlo") for n in ("v5e_2x2", "v5p_2x2x1"))
    start = time.perf_counter()
    assert diff(a, b).kind != "none"
    assert time.perf_counter() - start < 5


X = jnp.ones((4, 8))
CHANGES = {
    "none": (lambda x, y: jnp.sin(x) - y, lambda p, q: jnp.sin(p) - q),
    "wiring": (lambda x, y: jnp.sin(x) - y, lambda x, y: y - jnp.sin(x)),
    "constants": (lambda x, y: x * 2 + y, lambda x, y: x * 3 + y),
    "ops": (lambda x, y: jnp.sin(x) - y, lambda x, y: jnp.cos(x) - y),
    "removed": (lambda x, y: jnp.sin(jnp.exp(x)) - y, lambda x, y: jnp.sin(x) - y),
    "inserted": (lambda x, y: jnp.sin(x) - y, lambda x, y: jnp.sin(jnp.exp(x)) - y),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_small_changes(kind):
    a, b = (jax.jit(f).lower(X, X) for f in CHANGES[kind])
    result = diff(a, b)
    assert (result.kind, result.place_count) == (kind, int(kind != "none"))


def test_command_and_baseline(tmp_path, capsys):
    for name, kind in (("a", 0), ("b", 1)):
        text = jax.jit(CHANGES["ops"][kind]).lower(X, X).as_text()
        (tmp_path / f"{name}.mlir").write_text(text)
    a, b, base = (str(tmp_path / n) for n in ("a.mlir", "b.mlir", "base.json"))
    assert main(["diff", a, a]) == 0
    assert main(["diff", a, b, "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out.split("\n", 3)[3])["kind"] == "ops"
    assert main(["diff", a, "missing.hlo"]) == 2
    assert main(["diff", a, "--baseline", base, "--update"]) == 0
    assert main(["diff", a, "--baseline", base]) == 0
    assert main(["diff", b, "--baseline", base]) == 1
    assert "+1 cosine f32[4,8]" in capsys.readouterr().out
