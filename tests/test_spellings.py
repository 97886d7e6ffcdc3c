"""Spellings of attention match and stay exact; look-alikes do not match."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_spellings import DECOYS, SPELLINGS
from zoo_tools import errors, run

from hlo_tools import StableHloModule
from hlo_tools.driver import run_passes
from hlo_tools.targets import Target


def lowered(spelling, dtype):
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in spelling.shapes]
    return jax.jit(spelling.function, keep_unused=True).lower(*types).as_text()


def arrays(spelling, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in spelling.shapes]


def transformed(text, passes="default"):
    return run_passes(StableHloModule.parse(text), passes, Target.parse("cpu"))


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr("hlo_tools.binding.FASTER", float("inf"))


# what the newest JAX is tried on, too
SMOKE = ("plain", "causal_tril_where", "gqa_repeat", "library", "scanned", "decode")


def marked(name):
    return pytest.param(name, marks=pytest.mark.smoke if name in SMOKE else ())


@pytest.mark.parametrize("name", [marked(name) for name in SPELLINGS])
def test_spelling_is_bound_and_exact(name):
    spelling = SPELLINGS[name]
    text = lowered(spelling, jnp.float32)
    module, report = transformed(text)
    module.verify()
    assert [(s.status, s.reason) for s in report.sites if s.status != "bound"] == []
    assert len(report.sites) == 1
    if spelling.causal is not None:
        assert report.sites[0].attributes["causal"] == spelling.causal
    inputs = arrays(spelling)
    before, after = run(text, inputs), run(module.as_text(), inputs)
    assert max(errors(after, before)) < 1e-5


@pytest.mark.parametrize("name", SPELLINGS)
def test_low_precision_is_as_good_as_the_original(name):
    spelling = SPELLINGS[name]
    text = lowered(spelling, jnp.bfloat16)
    module, report = transformed(text)
    assert [s.status for s in report.sites] == ["bound"]
    inputs = [x.astype(jnp.bfloat16) for x in arrays(spelling)]
    exact = run(lowered(spelling, jnp.float32), inputs)
    theirs = max(errors(run(text, inputs), exact))
    ours = max(errors(run(module.as_text(), inputs), exact))
    assert ours <= 2 * theirs + 1e-3, f"{ours:.3g} > 2 * {theirs:.3g}"


@pytest.mark.smoke
@pytest.mark.parametrize("name", DECOYS)
def test_decoy_does_not_match(name):
    module, report = transformed(
        lowered(DECOYS[name], jnp.float32), "normalize,outline-attention"
    )
    assert "stablehlo.composite" not in module.as_text()
    assert all(site.status == "near-miss" for site in report.sites)
