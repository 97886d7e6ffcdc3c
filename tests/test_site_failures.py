"""An error at one site of a program leaves that site as it is, and no other."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir

import hlo_tools
from hlo_tools import StableHloModule, binding, driver
from hlo_tools.passes import bind_pairs
from hlo_tools.targets import Target


def attention(q, k, v, scale):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def two_sites(q, k, v):
    first, second = attention(q, k, v, 0.25), attention(q + 1, k, v, 0.5)
    return (first**2).sum() + (second**2).sum()


# made anew for each test: a function that was compiled before is not compiled again
PROGRAMS = {
    "forward": lambda: two_sites,
    "gradient": lambda: jax.grad(two_sites, (0, 1, 2)),
}


def second_builds(monkeypatch):
    """An implementation that can not be built for the second site."""

    def build_of(build):
        def guarded(spec, *rest):
            if float(spec.scale) == 0.5:
                raise KeyError("as told")
            return build(spec, *rest)

        return guarded

    online = binding.load_implementations("hlo_tools.attention")["online"]
    assert online.grad is not None
    grad = dataclasses.replace(online.grad, build=build_of(online.grad.build))
    changed = dataclasses.replace(online, build=build_of(online.build), grad=grad)
    monkeypatch.setattr(binding, "load_implementations", lambda _: {"online": changed})


def second_splices(monkeypatch):
    """MLIR fails when half of the second site has been replaced."""
    called = []
    call = bind_pairs.PairBinder._call

    def second(self, name, values):
        called.append(name)
        if len(called) == 4:  # the backward half
            ir.Module.parse("as told", stage_context())
        return call(self, name, values)

    monkeypatch.setattr(bind_pairs.PairBinder, "_call", second)


def stage_context():
    return jax.jit(lambda: 0).lower().compiler_ir("stablehlo").context


FAILING = [
    ("forward", second_builds, "KeyError: 'as told'"),
    ("gradient", second_builds, "KeyError: 'as told'"),
    ("gradient", second_splices, "MLIRError: .*custom op 'as' is unknown"),
]


@pytest.mark.parametrize(("program", "failure", "message"), FAILING)
def test_an_error_at_one_site_costs_that_site_alone(
    monkeypatch, capsys, program, failure, message
):
    monkeypatch.setattr(binding, "FASTER", float("inf"))
    monkeypatch.setattr(binding, "_lowered", {})
    failure(monkeypatch)
    function = PROGRAMS[program]()
    arrays = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
    ours = hlo_tools.jit(function)
    got, want = ours(*arrays), jax.jit(function)(*arrays)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    report = ours.report()
    assert [site.status for site in report.sites] == ["bound", "failed"]
    assert not report.notes
    bad = report.sites[1]
    assert re.search(f"binding it failed: {message}", bad.reason)
    assert bad.implementation is None
    assert bad.reason in capsys.readouterr().err
    failure(monkeypatch)
    module = StableHloModule.parse(jax.jit(function).lower(*arrays).as_text())
    with pytest.raises((KeyError, ir.MLIRError)):
        driver.run_passes(module, "default", Target.parse("cpu"), strict=True)
