"""Optimization levels: what they do, second runs, equal values."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from zoo_tools import assert_same_values, results_of

import hlo_tools
from hlo_tools import StableHloModule
from hlo_tools.driver import StageConfig, run_passes, transform
from hlo_tools.passes import ALIASES
from hlo_tools.pipeline import PassPipeline, stands_alone
from hlo_tools.targets import Target

SHARED = Path(os.environ.get("HLO_TOOLS_SHARED", Path(__file__).parents[2] / "shared"))
INDEX = SHARED / "zoo" / "index.json"
ROWS = json.loads(INDEX.read_text()) if INDEX.exists() else []
CORPUS = SHARED / "corpora" / "stablehlo_testdata"
CPU = Target.parse("cpu")
needs_zoo = pytest.mark.skipif(not ROWS, reason=f"no zoo at {INDEX.parent}")


def wasteful(x):
    table = jnp.asarray([1.0, 2.0, 4.0]) * 2.0
    looked_up = jax.lax.dynamic_slice(x, (1,), (2,)) * 1.0
    return jax.lax.cond(True, lambda y: y + table[2], lambda y: y * 0.0, looked_up)


def run(text, passes):
    return run_passes(StableHloModule.parse(text), passes, CPU)


def changes_nothing(text, passes):
    """Returns whether a second run leaves every result computed as it was."""
    module, _ = run(text, passes)
    module.verify()
    before, count = results_of(module.main), module.op_count()
    run_passes(module, passes, CPU)
    module.verify()
    return results_of(module.main) == before and module.op_count() == count


def test_o0_does_nothing_and_o2_is_the_default():
    assert PassPipeline.parse("O0").passes == ()
    assert PassPipeline.parse("O2") == PassPipeline.parse("default")
    assert not any(map(stands_alone, PassPipeline.parse("default").passes))


def test_levels_simplify():
    text = jax.jit(wasteful).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).as_text()
    counts = {level: run(text, level)[0].op_count() for level in ("O0", "O1", "O3")}
    assert counts["O1"] == counts["O3"] < counts["O0"]
    rewritten = run(text, "O1")[0].as_text()
    for gone in ("case", "dynamic_slice", "multiply"):
        assert f"stablehlo.{gone}" not in rewritten


def test_the_default_hands_on_what_jax_made_and_o1_what_it_simplified():
    module = jax.jit(wasteful).lower(jnp.arange(8.0)).compiler_ir("stablehlo")
    assert transform(module, CPU, StageConfig("O2"))[0] is module
    assert transform(module, CPU, StageConfig("O1"))[0] is not module
    assert transform(module, CPU, StageConfig("O3"))[0] is not module
    plain = jax.jit(jnp.sin).lower(1.0).compiler_ir("stablehlo")
    assert transform(plain, CPU, StageConfig("O3"))[0] is plain


def test_levels_under_jit():
    x = jnp.arange(8.0)
    want = jax.jit(wasteful)(x)
    for level in ALIASES:
        if level.startswith("O"):
            assert (hlo_tools.jit(wasteful, passes=level)(x) == want).all()


def zoo_rows():
    return [row for row in ROWS if not row["dropout"]]


def small_rows():
    names = ("eqx_mha_causal_train", "jaxnn_bias_causal_fwd")
    return [row for row in ROWS if row["name"] in names]


@needs_zoo
@pytest.mark.parametrize("level", ["default", "O1", "O3"])
def test_a_second_run_changes_nothing_in_the_zoo(level):
    rows = zoo_rows()[::8] if level != "O1" else zoo_rows()[::16]
    texts = {row["name"]: (SHARED / "zoo" / row["file"]).read_text() for row in rows}
    assert [n for n, text in texts.items() if not changes_nothing(text, level)] == []


@needs_zoo
@pytest.mark.slow
@pytest.mark.parametrize("level", ["default", "O1", "O3"])
def test_a_second_run_changes_nothing_anywhere(level):
    files = [SHARED / "zoo" / row["file"] for row in ROWS]
    files += sorted(CORPUS.glob("*.mlir"))
    wrong = [f.name for f in files if not changes_nothing(f.read_text(), level)]
    assert wrong == []


@needs_zoo
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_sites_are_found_as_by_default(level):
    """Where it matches at all, a level finds what the default finds."""
    for row in zoo_rows()[::6]:
        text = (SHARED / "zoo" / row["file"]).read_text()
        default, found = (run(text, passes)[1].sites for passes in ("default", level))
        kept = [] if level == "O1" else default
        assert [(s.id, s.status) for s in found] == [(s.id, s.status) for s in kept]


@needs_zoo
@pytest.mark.parametrize("row", small_rows(), ids=lambda row: row["name"])
def test_values_at_o3(row):
    text = (SHARED / "zoo" / row["file"]).read_text()
    assert_same_values(text, run(text, "O3")[0].as_text())


@needs_zoo
@pytest.mark.slow
@pytest.mark.parametrize("row", zoo_rows(), ids=lambda row: row["name"])
def test_all_values_at_o3(row):
    text = (SHARED / "zoo" / row["file"]).read_text()
    assert_same_values(text, run(text, "O3")[0].as_text())
