"""Sites under a mesh: bound through shard_map, with the original's collectives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hlo_tools

B, T, D, H, K, HD = 8, 48, 32, 4, 2, 16
COLLECTIVE = re.compile(
    r"= \S+ (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
)


def layer(x, wq, wk, wv, wo):
    q = jnp.einsum("btd,dhe->bthe", x, wq)
    k = jnp.repeat(jnp.einsum("btd,dhe->bthe", x, wk), H // K, axis=2)
    v = jnp.repeat(jnp.einsum("btd,dhe->bthe", x, wv), H // K, axis=2)
    s = jnp.einsum("bqhe,bkhe->bhqk", q, k) / 4.0
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e30)
    o = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(s), v)
    return x + jnp.einsum("bthe,hed->btd", o, wo)


def arguments(mesh, x_spec, head_axis):
    rng = np.random.default_rng(0)

    def put(shape, spec):
        array = rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[0])
        return jax.device_put(array, NamedSharding(mesh, spec))

    return (
        put((B, T, D), x_spec),
        put((D, H, HD), P(None, head_axis)),
        put((D, K, HD), P(None, head_axis)),
        put((D, K, HD), P(None, head_axis)),
        put((H, HD, D), P(head_axis)),
    )


def collectives(compiled):
    return sorted(COLLECTIVE.findall(compiled.as_text()))


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr("hlo_tools.binding.FASTER", float("inf"))


MESHES = {
    "data": (((8,), ("data",)), P("data"), None),
    "data over two axes": (((4, 2), ("a", "b")), P(("a", "b")), None),
    "heads": (((2,), ("tensor",)), P(), "tensor"),
    "data and heads": (((4, 2), ("data", "tensor")), P("data"), "tensor"),
}


def compiled_pair(args):
    ours = hlo_tools.jit(layer)
    return ours, jax.jit(layer).lower(*args).compile(), ours.lower(*args).compile()


@pytest.mark.parametrize("name", MESHES)
def test_bound_without_a_new_collective(name):
    (shape, axes), x_spec, head_axis = MESHES[name]
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
    args = arguments(mesh, x_spec, head_axis)
    ours, before, after = compiled_pair(args)
    (site,) = ours.report().sites
    assert site.status == "bound", site.reason
    assert site.config["shard_map"]
    assert collectives(after) == collectives(before)
    np.testing.assert_allclose(
        np.asarray(after(*args)), np.asarray(before(*args)), rtol=2e-5, atol=2e-5
    )


def test_explicit_axes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    args = arguments(mesh, P("data"), None)
    with jax.set_mesh(mesh):
        ours, before, after = compiled_pair(args)
    (site,) = ours.report().sites
    assert site.status == "bound", site.reason
    assert collectives(after) == collectives(before)
    np.testing.assert_allclose(
        np.asarray(after(*args)), np.asarray(before(*args)), rtol=2e-5, atol=2e-5
    )


def test_inside_shard_map():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    args = arguments(mesh, P("data"), None)

    def local(*xs):
        return jax.shard_map(
            layer,
            mesh=mesh,
            in_specs=(P("data"), P(), P(), P(), P()),
            out_specs=P("data"),
        )(*xs)

    ours = hlo_tools.jit(local)
    got, want = ours(*args), jax.jit(local)(*args)
    assert [s.status for s in ours.report().sites] == ["bound"]
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("x_spec", [P(None, "data"), P("data", "seq")])
def test_sequence_sharded_sites_are_inlined_with_their_reason(x_spec):
    axes = ("data",) if "seq" not in x_spec else ("data", "seq")
    shape = (8,) if len(axes) == 1 else (4, 2)
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
    args = arguments(mesh, x_spec, None)
    ours, before, after = compiled_pair(args)
    (site,) = ours.report().sites
    assert site.status == "inlined"
    assert "sequence" in site.reason or "split" in site.reason
    np.testing.assert_array_equal(np.asarray(after(*args)), np.asarray(before(*args)))


def test_replicated_sites_on_several_devices_are_bound():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    args = arguments(mesh, P(), None)
    ours, before, after = compiled_pair(args)
    assert [s.status for s in ours.report().sites] == ["bound"]
    assert collectives(after) == collectives(before)
    np.testing.assert_allclose(
        np.asarray(after(*args)), np.asarray(before(*args)), rtol=2e-5, atol=2e-5
    )
