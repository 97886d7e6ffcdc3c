"""verify=True: a wrong kernel is found, rolled back alone, and reported."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlo_tools
from hlo_tools import binding, verify
from hlo_tools.composites import Implementation


def attention(q, k, v):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)


def two_layers(q, k, v):
    return attention(attention(q, k, v)[:, :, :, :8], k[..., :8], v[..., :8])


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 32, 2, 16)).astype(np.float32) for _ in range(3)]


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr(binding, "FASTER", float("inf"))


def online() -> Implementation:
    return binding.load_implementations("hlo_tools.attention")["online"]


def use(monkeypatch, implementation):
    monkeypatch.setattr(
        binding, "load_implementations", lambda _: {"online": implementation}
    )


def test_right_kernels_pass(inputs):
    f = hlo_tools.jit(two_layers, verify=True)
    want = jax.jit(two_layers)(*inputs)
    np.testing.assert_allclose(
        np.asarray(f(*inputs)), np.asarray(want), rtol=1e-4, atol=1e-5
    )
    sites = f.report().sites
    assert [site.status for site in sites] == ["bound", "bound"]
    assert all(s.verify.passed and s.verify.max_error < 1e-5 for s in sites)


def test_wrong_kernel_is_rolled_back_alone(inputs, monkeypatch, capsys):
    good = online()

    def build(spec, target):
        right = good.build(spec, target)
        if spec.head_dim == 8:  # wrong for one of the two sites
            return lambda *args: right(*args) * 1.01
        return right

    use(monkeypatch, dataclasses.replace(good, build=build))
    f = hlo_tools.jit(lambda *args: two_layers(*args), verify=True)
    got, want = f(*inputs), jax.jit(two_layers)(*inputs)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-5)
    first, second = f.report().sites
    assert first.status == "bound"
    assert second.status == "failed"
    assert not second.verify.passed
    assert "rolled back" in second.reason
    assert second.id in capsys.readouterr().err


def test_nan_is_compared():
    want = np.array([1.0, np.nan])
    assert verify.compare(np.array([1.0, np.nan]), want, 0.0).passed
    assert not verify.compare(np.array([1.0, 2.0]), want, 1.0).passed
    assert not verify.compare(np.array([np.inf, np.nan]), want, 1.0).passed
