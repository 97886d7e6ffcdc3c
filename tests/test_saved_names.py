"""Checkpoints that save some of an attention's values by name."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from test_joint import POLICIES, B, D, E, H, T, agree, arrays, assert_pairs, causal

import hlo_tools


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr("hlo_tools.binding.FASTER", float("inf"))


def named_layer(x, w):
    """A layer with names: q, k, v, s(cores), p(robabilities), o(ut)."""
    q, k, v = [
        checkpoint_name((x @ w[i]).reshape(*x.shape[:2], H, D), "qkv"[i])
        for i in range(3)
    ]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
    probs = jax.nn.softmax(causal(checkpoint_name(scores, "s")), -1)
    out = jnp.einsum("bhqk,bkhd->bqhd", checkpoint_name(probs, "p"), v)
    y = checkpoint_name(out.reshape(x.shape), "o") @ w[3]
    return x + jnp.tanh(y)


def step(names, loop):
    layer = jax.checkpoint(named_layer, policy=POLICIES.save_only_these_names(*names))

    def loss(x, ws):
        if loop == "scan":
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)
        else:
            for w in ws:
                x = layer(x, w)
        return (x**2).mean()

    return jax.value_and_grad(loss, (0, 1))


INPUTS = arrays((B, T, E), (2, 4, E, E))


@pytest.mark.parametrize("loop", ["scan", "python"])
@pytest.mark.parametrize(
    "names",
    [
        "o",
        "so",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("po", "spo", "qo")),
    ],
)
def test_a_saved_result(names, loop):
    """The backward pass computes the probabilities again, but not the result."""
    report = agree(step(names, loop), *INPUTS)
    assert_pairs(report, 1 if loop == "scan" else 2)
    assert all(site.recompute_avoided_flops for site in report.sites) or "s" in names


def test_nothing_but_the_result_and_statistics_is_saved_in_a_loop():
    text = jax.jit(step("o", "scan")).lower(*INPUTS).as_text()
    after = hlo_tools.rewrite_text(text)
    assert f"tensor<2x{B}x{H}x{T}xf32>" in after  # the statistics of the rows
    assert f"tensor<2x{B}x{T}x{H}x{D}xf32>" not in after  # queries, keys or values


@pytest.mark.parametrize("loop", ["scan", "python"])
@pytest.mark.parametrize(
    "names", ["s", "p", pytest.param("sp", marks=pytest.mark.slow)]
)
def test_a_result_made_from_saved_probabilities(names, loop):
    report = agree(step(names, loop), *INPUTS)
    assert all(site.status == "inlined" for site in report.sites)
    for site in report.sites:
        assert "the result is computed once more" in site.reason


def test_other_weights_are_no_recomputation():
    """Scores of the same form from other arrays are another attention."""

    def loss(x, ws):
        first, second = named_layer(x, ws[0]), named_layer(x, ws[1])
        return (first * second).sum()

    assert_pairs(agree(jax.value_and_grad(loss, (0, 1)), *INPUTS), 2)


def test_a_loop_over_the_same_weights_backwards():
    """Two loops that read one stack at different slots share no scores."""

    def loss(x, ws):
        x, _ = jax.lax.scan(lambda x, w: (named_layer(x, w), None), x, ws)
        x, _ = jax.lax.scan(lambda x, w: (named_layer(x, w), None), x, ws, reverse=True)
        return (x**2).mean()

    report = agree(jax.value_and_grad(loss, (0, 1)), *INPUTS)
    assert [site.status for site in report.sites] == ["bound", "inlined"]


def test_checkpointed_bias_from_a_table():
    def layer(x, w, table):
        places = jnp.clip(jnp.arange(T) - jnp.arange(T)[:, None] + 2, 0, 4)
        bias = jnp.take(table, places, axis=0).transpose(2, 0, 1)
        q, k, v = [(x @ w[i]).reshape(B, T, H, D) for i in range(3)]
        probs = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias, -1)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(x.shape)
        return x + checkpoint_name(out, "o") @ w[3]

    def loss(x, ws, table):
        for w in ws:
            x = jax.checkpoint(layer, policy=POLICIES.save_only_these_names("o"))(
                x, w, table
            )
        return (x**2).mean()

    report = agree(jax.value_and_grad(loss, (0, 1, 2)), *INPUTS, *arrays((5, H)))
    assert_pairs(report, 2)


def test_scores_of_another_iteration_are_no_recomputation():
    """One body that multiplies with its own weights and with those of a neighbor."""

    def core(x, w):
        q, k, v = [(x @ w[i]).reshape(B, T, H, D) for i in range(3)]
        return jnp.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5, v

    def loss(x, ws):
        def body(y, i):
            scores, v = core(x, ws[i])
            again, _ = core(x, ws[1 - i])
            probs, other = jax.nn.softmax(scores, -1), jax.nn.softmax(again, -1)
            out = jnp.einsum("bhqk,bkhd->bqhd", probs, v)
            # what a gradient of the neighbor would be
            wrong = other * (scores - (other * scores).sum(-1, keepdims=True))
            return y + out.sum() + jnp.einsum("bhqk,bkhd->bqhd", wrong, v).sum(), None

        return jax.lax.scan(body, 0.0, jnp.arange(2))[0]

    agree(loss, *INPUTS)
    agree(jax.value_and_grad(loss, (0, 1)), *INPUTS)


def test_a_cotangent_that_is_the_values():
    def loss(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
        return (out * jax.lax.stop_gradient(v)).sum()

    def loop(w, xs):
        def body(total, x):
            q, k, v = [(x @ w[i]).reshape(B, T, H, D) for i in range(3)]
            return total + loss(q, k, v), None

        return jax.lax.scan(body, 0.0, xs)[0]

    report = agree(jax.value_and_grad(loop), *arrays((4, E, E), (3, B, T, E)))
    assert all(site.status in ("bound", "inlined") for site in report.sites)
