"""Patterns that users write: what is found, what is not, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlo_tools
from hlo_tools import patterns
from hlo_tools.patterns import PatternError


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def norm(x, scale):
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6) * scale


def other_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


EXAMPLE = (shape(2, 4, 8), shape(8))


@pytest.fixture
def registered():
    """Registers the norm, or another pattern, for one test."""
    made = []

    def register(reference=norm, replacement=other_norm, example=EXAMPLE, **more):
        one = hlo_tools.pattern(
            reference=reference,
            replacement=replacement,
            example=example,
            name="norm",
            **more,
        )
        made.append(one)
        return one

    yield register
    for one in made:
        patterns.unregister(one)


def arrays(*shapes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def check(program, *args, **options):
    """Runs a program both ways; returns the sites."""
    jitted = hlo_tools.jit(program, verify=True, **options)
    for got, want in zip(
        jax.tree.leaves(jitted(*args)),
        jax.tree.leaves(jax.jit(program)(*args)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
    return jitted.report().sites


def square_root(x, w):
    v = jnp.sum(x**2, axis=-1) / x.shape[-1]
    return w * (x * (1 / jnp.sqrt(v + 1e-6))[..., None])


@pytest.mark.parametrize("sizes", [(2, 5, 16), (7, 32)], ids=str)
def test_other_spellings_sizes_and_a_residual(registered, sizes):
    registered()

    def loss(x, w, m):
        x = jnp.cos(x)
        return jnp.sum(jnp.sin(x + square_root(x, w) @ m))

    width = sizes[-1]
    args = arrays(sizes, (width,), (width, width))
    (site,) = check(jax.value_and_grad(loss, (0, 1, 2)), *args)
    assert site.status == "bound"
    assert site.gradient["bound"]
    assert site.gradient["wanted"] == ["0", "1"]
    assert site.verify.passed


def test_sites_that_feed_each_other(registered):
    registered()

    def loss(x, w):
        return jnp.sum(jnp.sin(norm(norm(x, w), w * 2)))

    sites = check(jax.value_and_grad(loss, (0, 1)), *arrays((3, 5, 8), (8,)))
    assert sites
    assert all(site.status == "bound" for site in sites)


DECOYS = {
    "epsilon": lambda x, w: (
        x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w
    ),
    "axis": lambda x, w: (
        x * jax.lax.rsqrt(jnp.mean(x * x, -2, keepdims=True) + 1e-6) * w
    ),
    "divisor": lambda x, w: (
        x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) / 9 + 1e-6) * w
    ),
    "other-value": lambda x, w: (
        x * jax.lax.rsqrt(jnp.mean(x * w, -1, keepdims=True) + 1e-6) * w
    ),
    "maximum": lambda x, w: (
        x * jax.lax.rsqrt(jnp.max(x * x, -1, keepdims=True) / 8 + 1e-6) * w
    ),
    "scale-of-rows": lambda x, w: (
        x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w[:, None]
    ),
    "transposed": lambda x, w: (
        x * jax.lax.rsqrt(jnp.mean(x * x, -1) + 1e-6)[:, None, :] * w
    ),
}


@pytest.mark.parametrize("name", DECOYS)
def test_decoys_are_left_alone(registered, name):
    registered()
    x, w = arrays((3, 8, 8), (8,))
    sites = check(lambda x, w: DECOYS[name](x * x + 1, w), x, w)
    assert all(site.status == "near-miss" for site in sites)
    assert all(site.near_miss is not None for site in sites)


def test_an_intermediate_that_is_used_elsewhere(registered):
    registered()

    def program(x, w):
        inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return x * inverse * w, inverse

    (site,) = check(program, *arrays((3, 5, 8), (8,)))
    assert site.status == "near-miss"
    assert "used outside the site" in site.reason


def test_a_wrong_replacement_is_rolled_back(registered, capfd):
    registered(replacement=lambda x, w: norm(x, w) * 1.01)
    (site,) = check(lambda x, w: norm(x, w), *arrays((3, 5, 8), (8,)))
    assert site.status == "failed"
    assert not site.verify.passed
    assert "rolled back" in capfd.readouterr().err


def test_when_leaves_sites_alone(registered):
    registered(when=lambda x, w: x.shape[-1] > 8)
    (site,) = check(lambda x, w: norm(x, w), *arrays((3, 5, 8), (8,)))
    assert site.status == "inlined"
    assert "`when`" in site.reason


def test_inside_a_scan(registered):
    registered()

    def program(x, ws):
        return jax.lax.scan(lambda h, w: (jnp.sin(norm(h, w)), None), x, ws)[0]

    (site,) = check(program, *arrays((3, 5, 8), (4, 8)))
    assert site.status == "bound"


def test_results_must_agree(registered):
    with pytest.raises(PatternError, match="expected what the reference returns"):
        registered(replacement=lambda x, w: norm(x, w).sum())
