"""Sites in loops: how often they run, and what is no longer saved for all layers."""

import jax
import jax.numpy as jnp
import pytest

import hlo_tools
from hlo_tools import StableHloModule, driver
from hlo_tools.targets import Target

B, T, H, D = 2, 32, 2, 8
SCORES = B * H * T * T * 4  # bytes
OUT = B * T * H * D * 4


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr("hlo_tools.binding.FASTER", float("inf"))


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def projected(x, weights):
    return attention(*(jnp.einsum("bthd,de->bthe", x, w) for w in weights))


def scanned(x, weights, layer=projected):
    last, _ = jax.lax.scan(lambda x, w: (x + layer(x, w), None), x, weights)
    return (last**2).sum()


def nested(x, weights):
    """Two groups of layers."""
    groups = weights.reshape(2, -1, *weights.shape[1:])

    def group(x, own):
        return jax.lax.scan(lambda x, w: (x + projected(x, w), None), x, own)

    return (jax.lax.scan(group, x, groups)[0] ** 2).sum()


def twice(function):
    """The whole of it in a loop, as where gradients are accumulated."""

    def accumulated(x, weights):
        step = lambda total, scale: (total + function(x * scale, weights), None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros_like(weights), jnp.array([1.0, 2.0]))[0]

    return accumulated


def sites_of(function, layers):
    x = jax.ShapeDtypeStruct((B, T, H, D), jnp.float32)
    weights = jax.ShapeDtypeStruct((layers, 3, D, D), jnp.float32)
    module = StableHloModule.parse(jax.jit(function).lower(x, weights).as_text())
    _, report = driver.run_passes(module, "default", Target.parse("cpu"))
    sites = report.with_status("bound")
    assert sites
    return sites


GRADIENT = jax.grad(scanned, 1)


def test_executions():
    assert [s.executions for s in sites_of(lambda x, w: projected(x, w[0]), 2)] == [1]
    assert [s.executions for s in sites_of(scanned, 6)] == [6]
    assert [s.executions for s in sites_of(nested, 6)] == [6]
    assert [s.executions for s in sites_of(twice(GRADIENT), 3)] == [6]


def test_a_loop_of_unknown_length():
    def until(x, weights):
        return jax.lax.while_loop(
            lambda x: x.sum() < 9, lambda x: x + projected(x, weights[0]), x
        )

    assert [site.executions for site in sites_of(until, 1)] == [None]


@pytest.mark.parametrize(
    "program",
    [GRADIENT, jax.grad(nested, 1), twice(GRADIENT)],
    ids=["scanned", "nested", "accumulated"],
)
def test_what_is_saved_grows_with_the_layers(program):
    """At least the probabilities of each further layer, less what is saved now."""
    saved = {}
    for layers in (2, 6):
        (site,) = sites_of(program, layers)
        assert site.gradient_bound
        saved[layers] = site.bytes_saved
    per_layer = (saved[6] - saved[2]) / 4
    assert SCORES - 2 * OUT <= per_layer <= 2 * SCORES


def test_it_is_near_what_xla_says():
    x = jnp.ones((B, T, H, D))
    weights = jnp.ones((16, 3, D, D))
    ours = hlo_tools.jit(GRADIENT)
    sizes = [
        one.lower(x, weights).compile().memory_analysis().temp_size_in_bytes
        for one in (jax.jit(GRADIENT), ours)
    ]
    (site,) = ours.report().sites
    assert site.bytes_saved == pytest.approx(sizes[0] - sizes[1], rel=0.3)


def test_layers_that_are_computed_again_save_nothing():
    def program(x, weights):
        return scanned(x, weights, jax.checkpoint(projected))

    saved = [[s.bytes_saved for s in sites_of(jax.grad(program, 1), n)] for n in (2, 6)]
    assert saved[0] == saved[1]
