"""Sites whose names hold only while every query sees a key: kernel or literal form."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_sites import error_of
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_attention_implementations import emulated_custom_call
from test_cudnn_grad import emulated_backward_call, emulated_training_call
from test_gpu_binding import emulate

import hlo_tools
from hlo_tools import StableHloModule, binding
from hlo_tools.driver import run_passes
from hlo_tools.targets import Target
from hlo_tools.verify import run_text
from pallas_kernels.attention import (
    cudnn,
    cudnn_grad,
    gpu_binding,
    online_tiling,
    reference,
)

B, T, H, D = 2, 32, 2, 8
ATOL = {"float32": 2e-6, "bfloat16": 1.6e-2}


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr(binding, "FASTER", float("inf"))


KERNELS = {"cudnn": cudnn.IMPLEMENTATION, "mosaic-gpu": gpu_binding.IMPLEMENTATION}


@pytest.fixture(params=KERNELS)
def emulated(request, monkeypatch):
    """A kernel in plain JAX, which runs anywhere; lowered anew for each test.

    It is the only implementation, and its name the value.
    """
    rows = {request.param: KERNELS[request.param]}
    monkeypatch.setattr(binding, "load_implementations", lambda _: rows)
    emulate(monkeypatch)
    monkeypatch.setattr(cudnn, "custom_call", emulated_custom_call)
    monkeypatch.setattr(cudnn_grad, "training_call", emulated_training_call)
    monkeypatch.setattr(cudnn_grad, "backward_call", emulated_backward_call)
    monkeypatch.setattr(binding, "_lowered", {})
    # XLA's CPU compiler has no products of bfloat16 that are float32
    monkeypatch.setattr(online_tiling, "product_dtypes", wide_products)
    return request.param


def wide_products(spec, widen):
    return spec.compute_dtype, spec.compute_dtype


def attention(change):
    """Returns (q, k, v, side) -> [B,T,H,D] with the scores [B,H,T,S] as changed."""

    def fn(q, k, v, side):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.35
        probs = jax.nn.softmax(change(scores, side), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", probs, v)

    return fn


def added(keep, dtype, fill=-1e30):
    return jnp.where(keep, jnp.zeros((), dtype), jnp.asarray(fill, dtype))


def of_rows(keys):
    """[B,S] -> [B,1,T,S]: padding hides keys, and all of them from padded queries."""
    return (keys[:, None, :] & keys[:, :, None])[:, None]


def causal():
    return jnp.tril(jnp.ones((T, T), bool))


def left_padding(s, keys):
    s = jnp.where(causal(), s, jnp.asarray(-1e30, s.dtype))
    return s + added(keys, s.dtype)[:, None, None, :]


def twice(s, keys):
    return s + added(causal(), s.dtype) + added(of_rows(keys), s.dtype)


def learned(s, bias):
    return jnp.where(causal(), s + bias, jnp.asarray(-1e30, s.dtype))


def learned_added(s, bias):
    return s + bias + added(causal(), s.dtype)


def keys_from(*first):
    return np.arange(T) >= np.array(first)[:, None]


def bias_hiding(*rows):
    """[B,H,T,S] of ordinary size; the named rows of one head are -1e30."""
    bias = np.random.default_rng(5).standard_normal((B, H, T, T))
    bias[:, :, :, 20] = -1e30  # a hidden key in every row is no reason to fall back
    bias[1, 0, list(rows), :] = -1e30
    return bias


# name -> (change of the scores, side that leaves each row a key, side that does not)
PROGRAMS = {
    "padding": (
        lambda s, keys: s + added(keys, s.dtype)[:, None, None, :],
        keys_from(0, 7)[:, ::-1], keys_from(0, T),
    ),
    "converted padding": (
        lambda s, keys: s + added(keys, "float32").astype(s.dtype)[:, None, None, :],
        keys_from(0, 7)[:, ::-1], keys_from(0, T),
    ),
    "padded rows": (
        lambda s, keys: s + added(of_rows(keys), s.dtype),
        keys_from(0, 0), keys_from(0, 7),
    ),
    "left padding": (left_padding, keys_from(0, 0), keys_from(0, 7)),
    "added twice": (twice, keys_from(0, 0), keys_from(3, 0)),
    "learned": (learned, bias_hiding(), bias_hiding(4, 9)),
    "learned, added": (learned_added, bias_hiding(), bias_hiding(4, 9)),
}  # fmt: skip


FAST = ("converted padding", "learned")
SOME_SLOW = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in PROGRAMS
]


def program(name, dtype, case, gradients):
    """Returns a function of the arrays (loss and gradients, or the result)."""
    change, *sides = PROGRAMS[name]
    side = sides[case == "empty"]
    floats = side.dtype != bool
    rng = np.random.default_rng(3)
    arrays = [*rng.standard_normal((4, B, T, H, D)), side]
    # what bfloat16 can say, whatever the dtype
    arrays = [
        x if x.dtype == bool else jnp.asarray(x, jnp.bfloat16).astype(dtype)
        for x in arrays
    ]
    fn = attention(change)

    def step(weight, *xs):
        def loss(*xs):
            out = fn(*xs)
            return (out * weight).sum(), out

        wanted = (0, 1, 2, 3) if floats else (0, 1, 2)
        grads, out = jax.grad(loss, wanted, has_aux=True)(*xs)
        return out, *grads

    if gradients:
        return step, [jnp.asarray(x) for x in (arrays[3], *arrays[:3], arrays[4])]
    return (lambda *xs: fn(*xs)), [jnp.asarray(x) for x in (*arrays[:3], arrays[4])]


def expected(name, case, gradients):
    with jax.enable_x64(True):
        fn, inputs = program(name, "float64", case, gradients)
        return jax.tree.map(np.asarray, jax.tree.leaves(jax.jit(fn)(*inputs)))


def is_guarded(name, gradients) -> bool:
    """-1e30 absorbs any score: a row is uniform, but lets its gradient through."""
    return name != "padded rows" or gradients


def check(got, plain, exact, dtype):
    """The error is at most twice that of the program as JAX compiles it."""
    assert len(got) == len(plain) == len(exact)
    for mine, theirs, right in zip(got, plain, exact, strict=True):
        assert np.isfinite(np.asarray(right)).all()
        scale = max(1.0, np.abs(right).max())
        limit = 2 * error_of(theirs, right) + ATOL[dtype] * scale
        assert error_of(mine, right) <= limit


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("case", ["seen", "empty"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_cpu(name, case, gradients):
    fn, inputs = program(name, "float32", case, gradients)
    staged = hlo_tools.jit(fn)
    got, plain = staged(*inputs), jax.jit(fn)(*inputs)
    (site,) = staged.report().sites
    assert (site.status, site.implementation) == ("bound", "online"), site.reason
    assert site.attributes["named"]
    assert site.attributes.get("guarded", False) == is_guarded(name, gradients)
    exact = expected(name, case, gradients)
    check(jax.tree.leaves(got), jax.tree.leaves(plain), exact, "float32")


def on_h200(fn, inputs, kernel):
    """Returns the site's report, and what the emulated program computes."""
    text = jax.jit(fn).lower(*inputs).as_text()
    module, report = run_passes(
        StableHloModule.parse(text), "default", Target.parse("h200")
    )
    (site,) = report.sites
    assert (site.status, site.implementation) == ("bound", kernel), site.reason
    text = module.as_text()
    guards = "stablehlo.case" in text or "stablehlo.if" in text
    assert guards == ("guarded" in site.attributes)
    return site, run_text(text, inputs, "cpu")


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("case", ["seen", "empty"])
@pytest.mark.parametrize("name", SOME_SLOW)
def test_emulated_kernel(name, case, gradients, emulated):
    fn, inputs = program(name, "bfloat16", case, gradients)
    site, got = on_h200(fn, inputs, emulated)
    assert site.attributes.get("guarded", False) == is_guarded(name, gradients)
    exact = expected(name, case, gradients)
    check(got, jax.tree.leaves(jax.jit(fn)(*inputs)), exact, "bfloat16")


@pytest.mark.parametrize("name", SOME_SLOW)
def test_branches(name, monkeypatch, emulated):
    """The kernel computes what it may, and nothing else."""

    def broken(half):
        return lambda *a: jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), half(*a))

    monkeypatch.setattr(cudnn_grad, "training_call", broken(emulated_training_call))
    emulate(monkeypatch, forward=broken(reference.BACKEND.forward))
    for case in ("seen", "empty"):
        fn, inputs = program(name, "bfloat16", case, gradients=True)
        _, got = on_h200(fn, inputs, emulated)
        for array in got[:3]:  # out, dq, dk
            assert np.isnan(array.astype("float32")).all() == (case == "seen")


def test_lowest_numbers_as_a_bias(emulated):
    """-inf, and the lowest bfloat16, which times log2(e) is -inf: both as if masked."""

    def with_low_numbers(dtype):
        fn, inputs = program("learned", dtype, "seen", gradients=True)
        bias = np.array(inputs[-1], np.float64)
        bias[:, :, :, 5:9] = -np.inf
        bias[:, :, :, 0] = float(jnp.finfo(jnp.bfloat16).min)
        bias[:, :, 0, 0] = 0.0
        return fn, [*inputs[:-1], jnp.asarray(bias, dtype)]

    fn, inputs = with_low_numbers("bfloat16")
    _, got = on_h200(fn, inputs, emulated)
    plain = jax.jit(fn)(*inputs)
    with jax.enable_x64(True):
        fn, inputs = with_low_numbers("float64")
        exact = jax.tree.map(np.asarray, jax.jit(fn)(*inputs))
    check(got, plain, exact, "bfloat16")


def test_what_has_no_guard():
    """A mask that always hides whole rows, or one too mild to tell, stays unnamed."""
    hidden = jnp.tril(jnp.ones((T, T), bool), k=-4)

    def mild(s, keys):
        return 1e-6 * left_padding_of(-1e9)(s, keys)

    def left_padding_of(fill):
        return lambda s, keys: s + added(of_rows(keys), s.dtype, fill)

    def always(s, keys):
        return s + added(hidden, s.dtype) + added(of_rows(keys), s.dtype)

    _, inputs = program("padded rows", "float32", "seen", gradients=False)
    for change in (mild, always):
        fn = attention(change)
        staged = hlo_tools.jit(lambda *xs, fn=fn: fn(*xs))
        got, want = staged(*inputs), jax.jit(fn)(*inputs)
        (site,) = staged.report().sites
        assert site.status == "bound"
        assert not site.attributes["named"]
        assert "guarded" not in site.attributes
        assert error_of(got, np.asarray(want, "float64")) < 1e-5


@pytest.mark.parametrize("case", ["seen", "empty"])
def test_each_device_decides_for_itself(case):
    """Batch and heads over a mesh, "learned": one device has the empty rows."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("data", "model"))
    fn, inputs = program("learned, added", "float32", case, gradients=True)
    specs = [P("data", None, "model")] * 4 + [P("data", "model")]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(inputs, specs, strict=True)
    ]
    staged = hlo_tools.jit(fn)
    got = staged(*placed)
    (site,) = staged.report().sites
    assert site.status == "bound", site.reason
    assert site.attributes["guarded"]
    assert "shard_map" in site.config
    text = staged.lower(*placed).compile().as_text()
    assert "all-gather" not in text
    exact = expected("learned, added", case, gradients=True)
    check(got, jax.jit(fn)(*inputs), exact, "float32")


def bert_step(q, k, v, keys, weight):
    """A training step's attention with an additive padding mask in bfloat16."""

    def loss(q, k, v):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(q.dtype)
        s = s + added(keys, q.dtype, -1e9)[:, None, None, :]
        p = jax.nn.softmax(s.astype(jnp.float32)).astype(q.dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", p, v)
        return (out * weight).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def test_bert_step_gets_a_kernel(monkeypatch):
    """By the cost model alone: cuDNN reads a mask of keys as one of [T,S]."""
    monkeypatch.undo()
    x = jax.ShapeDtypeStruct((16, 512, 12, 64), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((16, 512), bool)
    text = jax.jit(bert_step).lower(x, x, x, keys, x).as_text()
    _, report = run_passes(StableHloModule.parse(text), "default", Target.parse("h200"))
    (site,) = report.sites
    assert (site.status, site.implementation) == ("bound", "mosaic-gpu"), site.reason
    assert site.attributes["guarded"]
    assert {c.name for c in site.candidates if c.supported} > KERNELS.keys()


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
def test_compiles_for_tpu():
    target = Target.topology("v5e")
    assert target.devices is not None
    mesh = Mesh(np.array(target.devices[:1]), ("data",))
    whole = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((4, 1024, 8, 128), jnp.bfloat16, sharding=whole)
    keys = jax.ShapeDtypeStruct((4, 1024), bool, sharding=whole)
    staged = hlo_tools.jit(bert_step)
    text = staged.lower(x, x, x, keys, x).compile().as_text()
    (site,) = staged.report().sites
    assert (site.status, site.implementation) == ("bound", "tpu-flash"), site.reason
    assert site.attributes["guarded"]
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert "conditional" in text
