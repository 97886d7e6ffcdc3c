"""`assert_equivalent`: whatever a function takes, and what must not pass unnoticed."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlo_tools
from hlo_tools import binding, driver, verify_program
from hlo_tools.testing import assert_equivalent, measure_gain


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(0), (4, 8))


def scaled(x, n):
    return x * sum(range(n))  # a loop of Python: n is no array


def named(x, mode, act):
    return act(x) if mode == "on" else x


# ---- arguments


def test_random_keys(x):
    def split(key, x):
        first, second = jax.random.split(key)
        return {"key": first, "x": x + jax.random.normal(second, x.shape)}

    found = assert_equivalent(split, jax.random.key(1), x, grad="x")
    assert found.gradient_report is not None
    low = x.astype(jnp.bfloat16)
    assert_equivalent(split, jax.random.key(1), low)


def test_other_random_keys_differ(x):
    """Keys are numbers without a neighborhood: no tolerance holds for them."""

    def key(x):
        data = jnp.asarray([2**31, 7 + (x.sum() > 1e9)], jnp.uint32)
        return jax.random.wrap_key_data(data)

    passes = "inline-calls,bisect_fixtures:NextKey"
    with pytest.raises(AssertionError, match="key: result differs"):
        assert_equivalent(key, x, passes=passes, tolerance=0.5)


def test_text_and_functions_are_handed_on(x):
    assert_equivalent(named, x, "on", jnp.tanh, grad=True)
    assert_equivalent(named, x, mode="on", act=jnp.tanh, grad="x")
    report = measure_gain(named, x, "on", jnp.tanh, rounds=1)
    assert report.measured


@pytest.mark.parametrize(
    "options", [{"static_argnums": 1}, {"static_argnames": "n"}, {"static_argnums": -1}]
)
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: jax.jit(f, static_argnums=1)])
def test_static_numbers(x, wrap, options):
    assert_equivalent(wrap(scaled), x, 4, grad=0, **options)


def test_static_numbers_by_keyword(x):
    jitted = jax.jit(scaled, static_argnames="n")
    assert_equivalent(jitted, x, n=4, static_argnames="n", grad=True)
    assert measure_gain(jitted, x, n=4, static_argnames="n", rounds=1).measured


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: jax.jit(f, static_argnums=1)])
def test_a_number_that_has_to_be_static(x, wrap):
    expected = r"scaled can not be traced with args\[1\] = 4 .*static_argnums"
    with pytest.raises(TypeError, match=expected):
        assert_equivalent(wrap(scaled), x, 4)


def test_the_function_s_own_errors_are_its_own(x):
    with pytest.raises(ValueError, match="as told"):
        assert_equivalent(lambda x, n: next(_raise()), x, 4)


def _raise():
    raise ValueError("as told")
    yield


def test_flax_modules(x):
    model = nn.Dense(3)
    variables = model.init(jax.random.key(0), x)
    assert_equivalent(model.apply, variables, x, grad=True)
    assert_equivalent(lambda m, v, x: m.apply(v, x), model, variables, x, grad="v")


# ---- what to differentiate by


def two(q, k, *, bias):
    return q * k + bias


def test_gradients_by_name(x):
    choices: list[Any] = ["q", ("k", "bias"), ("q", 1), "bias", -1, np.int64(1)]
    for grad in choices:
        assert_equivalent(two, x, x + 1, bias=x * 2, grad=grad)


@pytest.mark.parametrize("grad", [7, 2, -3, "v", ("q", "v"), 1.5, (0, True), None])
def test_gradients_of_what_is_not_there(x, grad):
    with pytest.raises(TypeError, match="grad="):
        assert_equivalent(two, x, x, bias=x, grad=grad)


@pytest.mark.parametrize("tolerance", [-1e-3, float("nan"), float("inf")])
def test_a_tolerance_that_is_none(x, tolerance):
    with pytest.raises(ValueError, match="tolerance="):
        assert_equivalent(jnp.sin, x, tolerance=tolerance)


# ---- a stage that did nothing


def test_a_stage_that_failed_is_no_success(x, monkeypatch):
    def fails(module, target, config):
        raise ValueError("as told")

    monkeypatch.setattr(driver, "transform", fails)
    with (
        pytest.warns(RuntimeWarning, match="as told"),
        pytest.raises(AssertionError, match=r"the stage failed.*ValueError: as told"),
    ):
        assert_equivalent(lambda x: jnp.sin(x) + 1, x)
    assert_equivalent(lambda x: jnp.sin(x) + 1, x, allow_fallback=True)


def test_a_stage_that_is_off_is_no_success(x, monkeypatch):
    monkeypatch.setenv("HLO_TOOLS", "off")
    with pytest.raises(AssertionError, match="HLO_TOOLS switches the stage off"):
        assert_equivalent(jnp.sin, x)
    assert_equivalent(jnp.sin, x, allow_fallback=True)


def test_a_site_that_failed_is_no_success(monkeypatch):
    def attention(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    def fails(*args):
        raise KeyError("as told")

    monkeypatch.setattr(binding, "FASTER", float("inf"))
    monkeypatch.setattr(binding, "lower_function", fails)
    arrays = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
    with pytest.raises(AssertionError, match=r"failed: .*KeyError: 'as told'"):
        assert_equivalent(attention, *arrays)
    assert_equivalent(attention, *arrays, allow_fallback=True)


# ---- errors of what should be zero


def test_the_error_of_a_vanishing_result_is_no_alarm(monkeypatch):
    """The rounding of bfloat16 is all there is to it."""
    reference = verify_program.Reference(
        [],
        [np.full(4, 1e-3, jnp.bfloat16)],
        [np.full(4, 1e-9, np.float32)],
    )
    judged = reference.judge([np.full(4, -1e-3, jnp.bfloat16)], 2e-2)
    assert judged.passed
    assert judged.max_error > 1e5

    def vanishing(x):
        return (x - 0.5) - (x - 0.25) + 0.25

    monkeypatch.setattr(
        "hlo_tools.testing.Reference", lambda *_: reference_of(reference)
    )
    found = assert_equivalent(vanishing, jnp.ones(4, jnp.bfloat16))
    assert 0 < found.largest_error <= 2e-2


def reference_of(reference):
    """One that is asked about another result than the one at hand."""

    class Fixed:
        def judge(self, got, tolerance):
            return reference.judge([np.full(4, -1e-3, jnp.bfloat16)], tolerance)

    return Fixed()


def test_decorated_functions_keep_their_signature(x):
    decorated = hlo_tools.jit(two)
    assert_equivalent(decorated, x, x, bias=x, grad="k")
