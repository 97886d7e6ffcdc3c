"""Gradients of what an attention's scores are made of: tables, caps, bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_joint import QKV, B, H, T, agree, arrays, assert_pairs, attention, square

import hlo_tools

N = 5  # distances that are told apart


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr("hlo_tools.binding.FASTER", float("inf"))


def buckets():
    return jnp.clip(jnp.arange(T) - jnp.arange(T)[:, None] + 2, 0, N - 1)


def one_hot(table):
    return jnp.einsum("qkn,nh->qkh", jax.nn.one_hot(buckets(), N), table)


LOOKUPS = {
    "index": lambda table: table[buckets()],
    "take": lambda table: jnp.take(table, buckets(), axis=0),
    "clip": lambda table: jnp.take(table, buckets(), axis=0, mode="clip"),
    "fill": lambda table: table.at[buckets()].get(mode="fill", fill_value=0),
    "one-hot": one_hot,
}


def with_bias(lookup, change=lambda s: s):
    def core(q, k, v, table):
        bias = lookup(table).transpose(2, 0, 1)
        return attention(q, k, v, lambda s: change(s + bias))

    return core


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (3,), (0, 1, 2)])
def test_relative_bias(lookup, wanted):
    f = jax.value_and_grad(square(with_bias(LOOKUPS[lookup])), wanted)
    report = agree(f, *arrays(*QKV, (N, H)))
    assert_pairs(report, 1)
    assert len(report.sites[0].gradient["wanted"]) == len(wanted)


@pytest.mark.parametrize("lookup", ["take", "one-hot"])
def test_masked_relative_bias(lookup):
    def causal(scores):
        return jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e30)

    core = with_bias(LOOKUPS[lookup], causal)
    f = jax.value_and_grad(square(core), (0, 1, 2, 3))
    assert_pairs(agree(f, *arrays(*QKV, (N, H))), 1)


def test_places_outside_of_the_table():
    """They are NaN in the result, and get no gradient."""

    def lookup(table):
        return jnp.take(table, buckets() + (jnp.arange(T) == 3) * N, axis=0)

    f = jax.grad(square(with_bias(lookup)), 3)
    inputs = arrays(*QKV, (N, H))
    want, got = jax.jit(f)(*inputs), hlo_tools.jit(f)(*inputs)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


def test_a_bias_that_two_layers_share():
    def core(q, k, v, table):
        bias = jnp.take(table, buckets(), axis=0).transpose(2, 0, 1)
        for _ in range(2):
            q = q + attention(q, k, v, lambda s: s + bias)
        return q

    f = jax.value_and_grad(square(core), (0, 1, 2, 3))
    assert_pairs(agree(f, *arrays(*QKV, (N, H))), 2)


def test_products_of_queries_and_positions():
    """The gradient of such a bias goes into two products of its own."""

    def core(q, k, v, relative):
        bias = jnp.einsum("bqhd,qkd->bhqk", q, relative)
        return attention(q, k, v, lambda s: s + bias)

    f = jax.value_and_grad(square(core), (0, 1, 2, 3))
    assert_pairs(agree(f, *arrays(*QKV, (T, T, QKV[0][-1]))), 1)


@pytest.mark.parametrize("shape", [(), (H, 1, 1), (B, 1, 1, 1)])
def test_learned_softcap(shape):
    def core(q, k, v, cap):
        # scores of the cap's size: those of small scores cancel out
        return attention(16 * q, k, v, lambda s: cap * jnp.tanh(s / cap))

    f = jax.value_and_grad(square(core), (0, 1, 2, 3))
    report = agree(f, *arrays(*QKV), jnp.full(shape, 1.5))
    assert_pairs(report, 1)
    assert len(report.sites[0].gradient["wanted"]) == 4


BOUNDS = {
    "clip": lambda s: jnp.clip(s, -0.5, 0.5),
    "maximum": lambda s: jnp.maximum(s, -0.5),
    "minimum, swapped": lambda s: jnp.minimum(0.5, s),
    "relu6": lambda s: jnp.minimum(jnp.maximum(s, 0), 6),
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("ties", [False, True])
def test_bounded_scores(name, ties):
    """Two equals share the gradient: half of it goes to a score at the bound."""

    def core(q, k, v):
        scores = BOUNDS[name](jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)

    q, k, v = arrays(*QKV)
    if ties:  # scores are halves, many of them at a bound
        q, k = jnp.round(4 * q) / 2, jnp.round(4 * k)
        q = q.at[:, ::3].set(0)
    f = jax.value_and_grad(square(core), (0, 1, 2))
    assert_pairs(agree(f, q, k, v), 1)


def test_a_learned_bound():
    def core(q, k, v, bound):
        return attention(q, k, v, lambda s: jnp.minimum(s, bound[:, None, None]))

    f = jax.value_and_grad(square(core), (0, 1, 2, 3))
    assert_pairs(agree(f, *arrays(*QKV, (H,))), 1)


def test_another_gradient_at_the_bound_is_left_alone():
    """relu's own gradient is 0 at 0, where that of a maximum is a half."""

    def core(q, k, v):
        return attention(q, k, v, jax.nn.relu)

    report = agree(jax.value_and_grad(square(core), (0, 1, 2)), *arrays(*QKV))
    assert all(site.status != "bound" for site in report.sites)


@pytest.mark.parametrize("train", [False, True])
def test_a_sink_is_reported(train):
    def core(q, k, v, sink):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        column = jnp.broadcast_to(sink[:, None, None], (*scores.shape[:3], 1))
        probs = jax.nn.softmax(jnp.concatenate([scores, column], -1), -1)[..., :-1]
        return jnp.einsum("bhqk,bkhd->bqhd", probs, v)

    f = jax.value_and_grad(square(core), (0, 1, 2, 3)) if train else core
    (site,) = agree(f, *arrays(*QKV, (H,))).sites
    assert site.status == "near-miss"
    assert "a sink" in site.reason
    assert site.near_miss.operation == "stablehlo.slice"
