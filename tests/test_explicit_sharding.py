"""Meshes with explicit axes: bound as with automatic ones, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hlo_tools

SHAPE = (4, 16, 4, 8)  # B T H D
SPLITS = {
    "batch": P("data"),
    "head": P(None, None, "data"),
    "replicated": P(),
}


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr("hlo_tools.binding.FASTER", float("inf"))


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def loss(q, k, v):
    return (attention(q, k, v) ** 2).mean()


PROGRAMS = {
    "forward": attention,
    "loss": jax.value_and_grad(loss, (0, 1, 2)),
    "remat": jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2)),
}


def compiled(function, split, kind, **options):
    mesh = jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices()[:2])
    place = NamedSharding(mesh, SPLITS[split])
    arrays = jax.random.normal(jax.random.key(0), (3, *SHAPE))
    arguments = [jax.device_put(array, place) for array in arrays]
    ours = hlo_tools.jit(function, **options)
    before = jax.jit(function).lower(*arguments).compile()
    return ours, before, ours.lower(*arguments).compile(), arguments


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_explicit_axes_bind_as_automatic_ones(program, split):
    bound = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        ours, before, after, arguments = compiled(PROGRAMS[program], split, kind)
        report = ours.report()
        assert not report.notes
        for site in report.sites:
            assert site.status == "bound", site.reason
        bound[kind] = [(s.implementation, s.gradient_bound) for s in report.sites]
        texts = [one.as_text() or "" for one in (after, before)]
        assert collectives(texts[0]) == collectives(texts[1])
        got, want = (jax.tree.leaves(one(*arguments)) for one in (after, before))
        for ours_leaf, theirs in zip(got, want, strict=True):
            largest = np.abs(theirs).max()
            np.testing.assert_allclose(ours_leaf, theirs, rtol=0, atol=2e-5 * largest)
    assert bound[AxisType.Explicit] == bound[AxisType.Auto]
    assert any(gradient for _, gradient in bound[AxisType.Auto]) == (
        program != "forward"
    )


@pytest.mark.parametrize("program", ["forward", "loss"])
def test_sites_of_explicit_axes_can_be_verified(program):
    ours, *_ = compiled(PROGRAMS[program], "batch", AxisType.Explicit, verify=True)
    (site,) = ours.report().sites
    assert site.status == "bound", site.reason
    assert site.verify is not None
    assert site.verify.passed
