"""Corners where a careless rewrite changes values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlo_tools

B, T, S, H, D = 2, 20, 36, 2, 8


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr("hlo_tools.binding.FASTER", float("inf"))


def qkv(dtype: type = np.float32):
    rng = np.random.default_rng(0)
    shapes = ((B, T, H, D), (B, S, H, D), (B, S, H, D))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def attention(change, softmax=jax.nn.softmax, precision=None):
    def fn(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=precision)
        probs = softmax(change(scores))
        return jnp.einsum("bhqk,bkhd->bqhd", probs, v, precision=precision)

    return fn


def check(fn, arrays, status="bound", tolerance=2e-6):
    staged = hlo_tools.jit(lambda *xs: fn(*xs))
    got = np.asarray(staged(*arrays)).astype(np.float64)
    want = np.asarray(jax.jit(fn)(*arrays)).astype(np.float64)
    report = staged.report()
    assert [site.status for site in report.sites] == [status]
    assert not report.notes
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    return report.sites[0]


ROW_MASK = np.random.default_rng(1).random((T, S)) < 0.6
ROW_MASK[3] = ROW_MASK[11] = False  # queries that see nothing


@pytest.mark.parametrize("fill", [-1e30, -1e9, -1e4, -50.0, 0.0, -np.inf])
def test_rows_without_visible_keys(fill):
    fn = attention(lambda s: jnp.where(jnp.asarray(ROW_MASK), s, fill))
    check(fn, qkv())


@pytest.mark.parametrize("fill", [-1e30, -1e9, -1e4, -np.inf])
def test_additive_masks_with_empty_rows(fill):
    mask = jnp.where(jnp.asarray(ROW_MASK), 0.0, fill)
    # S + -1e9 keeps multiples of 64: which one a sum rounds to is chance
    tolerance = 2e-6 if fill != -1e9 else 1e-5
    check(attention(lambda s: s + mask), qkv(), tolerance=tolerance)


@pytest.mark.parametrize("fill", [-1e30, -1e9, -np.inf])
@pytest.mark.parametrize("outer", ["add", "where"])
def test_two_masks(fill, outer):
    """Added masks lower a key twice, so an empty row is not uniform."""
    causal = jnp.asarray(np.tril(np.ones((T, S), bool), k=-4))
    rows = jnp.asarray(ROW_MASK)

    def change(s):
        if outer == "add":
            s = jnp.where(causal, s, fill)
            return s + jnp.where(rows, 0.0, fill)
        return jnp.where(causal, s + jnp.where(rows, 0.0, fill), fill)

    check(attention(change), qkv(), tolerance=1e-5)


@pytest.mark.parametrize("offset", [-19, -4, 0, 5, 16, 40])
def test_causal_offsets(offset):
    mask = np.tril(np.ones((T, S), bool), k=offset)
    for fill in (-1e30, -np.inf):
        fn = attention(lambda s, fill=fill: jnp.where(jnp.asarray(mask), s, fill))
        check(fn, qkv())


def test_row_bias_of_minus_infinity_gives_nan():
    rows = jnp.where(jnp.arange(T) == 3, -jnp.inf, 0.0)[:, None]
    check(attention(lambda s: s + rows), qkv())


def test_positions_in_a_type_that_can_not_tell_them_apart():
    i = (jnp.arange(T).astype(jnp.float16) + 2048)[:, None]
    j = (jnp.arange(S).astype(jnp.float16) + 2048)[None, :]
    check(attention(lambda s: jnp.where(i >= j, s, -1e9)), qkv())


def test_additive_mask_in_half_precision():
    # no empty rows: whether XLA rounds S + mask to float16 there is its choice
    mask = jnp.where(jnp.asarray(ROW_MASK | ROW_MASK[:1]), 0.0, -65504.0)
    mask = mask.astype(jnp.float16)
    check(attention(lambda s: s + mask), qkv(np.float16), tolerance=4e-3)


@pytest.mark.parametrize("precision", ["highest", "high", "default"])
def test_dot_precision(precision):
    check(attention(lambda s: s * 0.35, precision=precision), qkv())


def unstable(scores):
    e = jnp.exp(scores)
    return e / e.sum(-1, keepdims=True)


def test_without_a_maximum_empty_rows_are_nan():
    """exp gives 0 for every key there: such a site is left alone."""
    masked = attention(lambda s: jnp.where(jnp.asarray(ROW_MASK), s, -1e9), unstable)
    site = check(masked, qkv(), status="near-miss")
    assert "maximum" in site.reason
    causal = np.tril(np.ones((T, S), bool))
    check(attention(lambda s: jnp.where(jnp.asarray(causal), s, -1e9), unstable), qkv())


def test_zero_and_infinite_scales_are_not_folded():
    for change in (lambda s: s / 0.0, lambda s: s * jnp.inf, lambda s: s * 0.0):
        fn = attention(change)
        staged = hlo_tools.jit(lambda *xs, fn=fn: fn(*xs))
        got, want = staged(*qkv()), jax.jit(fn)(*qkv())
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_negative_scale_with_mask():
    causal = np.tril(np.ones((T, S), bool), k=3)
    check(attention(lambda s: jnp.where(jnp.asarray(causal), -0.3 * s, -1e30)), qkv())


def test_float64():
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) for x in qkv()]
        check(attention(lambda s: s / 3.0), arrays, tolerance=1e-13)


def test_bitwise_binds_nothing():
    fn = attention(lambda s: s)
    staged = hlo_tools.jit(fn, exactness="bitwise")
    want = np.asarray(jax.jit(fn)(*qkv()))
    np.testing.assert_array_equal(np.asarray(staged(*qkv())), want)
    assert [s.status for s in staged.report().sites] == ["inlined"]


def test_nothing_bound_is_bit_identical(monkeypatch):
    monkeypatch.setattr("hlo_tools.binding.FASTER", 0.0)
    monkeypatch.setattr("hlo_tools.binding.MATTERING_BYTES", 1 << 60)
    fn = attention(lambda s: jnp.where(jnp.asarray(ROW_MASK), s, -1e9))
    ours, theirs = (
        jit(fn).lower(*qkv()).compile().as_text() for jit in (hlo_tools.jit, jax.jit)
    )
    assert ours == theirs
