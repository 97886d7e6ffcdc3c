"""cuDNN's backward pass: what is asked of it, and on a GPU what it answers."""

import re

import jax
import jax.numpy as jnp
import pytest
from attention_sites import alibi, biased, make_spec, mask_side, masked
from gradient_sites import BIAS_SITES, QKV, half_bias, make_grad_site
from test_attention_implementations import CUDNN_SITES, emulated_custom_call

from hlo_tools.gradients import GradSpec, attention_grad_ref
from hlo_tools.targets import Target
from pallas_kernels.attention import cudnn_grad
from pallas_kernels.attention.cudnn_calls import Gradients, backward_call, training_call

H200 = Target.parse("h200")
# jax.nn trains with a bias of even sizes only, and so do we.
ODD_BIAS = ("causal, offset", "lengths")
GRAD_SITES = [name for name in CUDNN_SITES if name not in ODD_BIAS]
QUICK = ("causal, more keys", "no visible key for some", "bias, mask, causal",
         "mask, -inf")  # fmt: skip
SLOW = pytest.mark.slow
HALF = "bfloat16"


def emulated_training_call(q, k, v, bias, scale, causal, window):
    """The forward call of the other tests, and the logsumexp of the same scores."""
    out = emulated_custom_call(q, k, v, bias, scale, causal, window)
    x = emulated_scores(q, k, bias, scale, causal, window)
    return out, jax.nn.logsumexp(x, axis=-1)


def emulated_scores(q, k, bias, scale, causal, window):
    """Scores [B,H,T,S] in float32, -inf where cuDNN's own mask hides a key."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2).astype(jnp.float32)
    x = jnp.einsum("bthd,bshd->bhts", q.astype(jnp.float32), k) * scale
    x = x if bias is None else x + bias.astype(jnp.float32)
    distance = jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None]
    keep = (distance <= 0) & (distance > -(window or k.shape[1] + q.shape[1]))
    return jnp.where(keep, x, -jnp.inf) if causal else x


def emulated_backward_call(
    q, k, v, bias, out, statistics, dout, scale, causal, window, wants_dbias
):
    """The usual backward pass, rounded where half precision products take values."""
    assert q.dtype == k.dtype == v.dtype == out.dtype == dout.dtype
    assert bias is None or q.shape[1] % 2 == 0 == k.shape[1] % 2
    assert statistics.shape == (q.shape[0], q.shape[2], q.shape[1])
    half, wide, group = q.dtype, jnp.float32, q.shape[2] // k.shape[2]
    x = emulated_scores(q, k, bias, scale, causal, window)
    probs = jnp.exp(x - statistics[..., None])
    wide_q, wide_out, wide_dout = (a.astype(wide) for a in (q, out, dout))
    wide_k, wide_v = (jnp.repeat(a, group, axis=2).astype(wide) for a in (k, v))
    dprobs = jnp.einsum("bthd,bshd->bhts", wide_dout, wide_v)
    delta = jnp.einsum("bthd,bthd->bht", wide_out, wide_dout)
    dx = probs * (dprobs - delta[..., None])
    rounded_dx, rounded_probs = (a.astype(half).astype(wide) for a in (dx, probs))
    dq = jnp.einsum("bhts,bshd->bthd", rounded_dx, wide_k) * scale
    dk = jnp.einsum("bhts,bthd->bshd", rounded_dx, wide_q) * scale
    dv = jnp.einsum("bhts,bthd->bshd", rounded_probs, wide_dout)
    dk, dv = (a.reshape(*a.shape[:2], -1, group, a.shape[3]).sum(3) for a in (dk, dv))
    dbias = None
    if wants_dbias:
        assert bias is not None
        assert bias.dtype == half
        axes = tuple(i for i in (0, 1) if bias.shape[i] == 1)
        dbias = dx.sum(axes, keepdims=True).astype(half)
    return Gradients(dq.astype(half), dk.astype(half), dv.astype(half), dbias)


@pytest.fixture
def emulated(monkeypatch) -> None:
    monkeypatch.setattr(cudnn_grad, "training_call", emulated_training_call)
    monkeypatch.setattr(cudnn_grad, "backward_call", emulated_backward_call)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else SLOW) for name in GRAD_SITES],
)
def test_semantics(name: str) -> None:
    """What is asked of cuDNN adds up to the site's gradients."""
    make_grad_site(name, "bfloat16").check(cudnn_grad.GRAD, H200)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "dbias, mask" else SLOW)
        for name in BIAS_SITES
    ],
)
def test_semantics_of_dbias(name: str) -> None:
    make_grad_site(name, "bfloat16", (0, *QKV)).check(cudnn_grad.GRAD, H200)


@pytest.mark.usefixtures("emulated")
def test_semantics_in_float16_and_of_parts() -> None:
    make_grad_site("causal", "float16", ("v",)).check(cudnn_grad.GRAD, H200)
    make_grad_site("mask", "float16", ("k", "q")).check(cudnn_grad.GRAD, H200)


@pytest.mark.usefixtures("emulated")
def test_lost_rows() -> None:
    """Rows that an additive mask hides: right if they do not count, NaN if they do."""
    spec = make_spec(dtype=HALF, k=1, g=1, **biased(2, 1, 1, 1, 40))
    grad = GradSpec(QKV, (HALF,) * 3, HALF)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(x, (2, 40, 1, 16), HALF) for x in keys)
    bias = jnp.zeros((2, 1, 1, 1, 40)).at[0].set(-1e9).at[1, ..., 3].set(-1e9)
    forward, backward = cudnn_grad.GRAD.build(spec, grad, H200)
    out, statistics = forward(q, k, v, bias)
    counted = backward(q, k, v, bias, out, statistics, dout)
    dout = dout.at[0].set(0)
    expected = attention_grad_ref(spec, grad, q, k, v, bias, dout)
    left_out = backward(q, k, v, bias, out, statistics, dout)
    for a, b, c in zip(counted, left_out, expected, strict=True):
        assert jnp.isnan(a[0]).all()
        assert jnp.array_equal(a[1], b[1])
        assert jnp.abs(b - c).max() < 0.02 * jnp.abs(c).max()


requires_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")


@requires_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", GRAD_SITES)
def test_on_gpu(name: str, dtype: str) -> None:
    make_grad_site(name, dtype).check(cudnn_grad.GRAD, H200)


@requires_gpu
@pytest.mark.parametrize("name", BIAS_SITES)
def test_dbias_on_gpu(name: str) -> None:
    make_grad_site(name, "bfloat16", (0, *QKV)).check(cudnn_grad.GRAD, H200)


# name -> (keywords of make_spec, GradSpec's fields, what the reason has to mention)
REFUSALS = {
    "what the forward pass refuses": ({"softcap": 3.0}, (), "softcap"),
    "float32 gradient": ({}, (("q", "k"), (HALF, "float32"), HALF), "of k: float32"),
    "float32 cotangent": ({}, (("q",), (HALF,), "float32"), "cotangent"),
    "other result": ({"out_dtype": "float16"}, (), "float16"),
    "precise products": (
        {"score_dtype": "float32", "precision": ("HIGHEST", "DEFAULT")}, (), "HIGHEST",
    ),
    "odd queries": (masked(2, 1, 1, 37, 40, t=37), (), "37 queries"),
    "odd keys": (masked(2, 1, 1, 1, 53, s=53), (), "53 keys"),
    "float32 bias": (
        biased(1, 2, 2, 40, 40, bias_dtype="float32"), ((0,), (HALF,), HALF), "float32",
    ),
    "bias of keys": (half_bias(2, 1, 1, 1, 40), ((0,), (HALF,), HALF), "summed"),
    "bias of groups": (half_bias(1, 2, 1, 40, 40), ((0,), (HALF,), HALF), "summed"),
    "slopes": (
        half_bias(1, 2, 2, 1, 1, fn=alibi), ((0,), (HALF,), HALF), "not the shape",
    ),
    "float mask": (
        {**masked(2, 1, 1, 40, 40), "sides": mask_side(2, 1, 1, 40, 40, dtype=HALF)},
        ((0,), (HALF,), HALF), "no bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    keywords, fields, words = REFUSALS[name]
    spec = make_spec(**{"dtype": HALF, **keywords})
    grad = GradSpec(*(fields or (QKV, (HALF,) * 3, HALF)))
    reason = cudnn_grad.GRAD.supports(spec, grad, H200)
    assert reason is not None
    assert words in reason


def test_lowers_anywhere() -> None:
    """Two custom calls, no Python callback, on a machine without a GPU."""
    site = make_grad_site("dbias, mask", HALF, (0, *QKV))
    forward, backward = cudnn_grad.GRAD.build(site.site.spec, site.grad, H200)
    inputs = site.site.inputs
    out, *residuals = jax.eval_shape(forward, *inputs)
    rows = {
        "Softmax": (forward, inputs),
        "SoftmaxBackward": (backward, [*inputs, out, *residuals, site.dout]),
    }
    for name, (function, args) in rows.items():
        text = lowered(function, args)
        assert text.count("stablehlo.custom_call") == 1
        assert f"@__cudnn$fmhaScaleBias{name}(" in text


def lowered(function, args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


# name -> (T, S, causal, window, batch and heads of the bias)
CALLS = {
    "full": (64, 64, False, 0, None),
    "causal, more keys": (64, 96, True, 0, None),
    "window": (64, 64, True, 9, None),
    "bias of heads": (64, 64, False, 0, (1, 4)),
    "bias of batch, causal": (64, 64, True, 0, (2, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_those_of_jax(name: str) -> None:
    """Operands, results, layouts and configuration are those that jax.nn writes."""
    t, s, causal, window, shape = CALLS[name]
    q, k, v, dout = (
        jax.ShapeDtypeStruct((2, n, h, 64), jnp.bfloat16)
        for n, h in ((t, 4), (s, 2), (s, 2), (t, 4))
    )
    operands = [q, k, v, dout]
    if shape is not None:
        operands.append(jax.ShapeDtypeStruct((*shape, t, s), jnp.bfloat16))

    def ours(q, k, v, dout, bias=None):
        options = (0.125, causal, window)
        out, statistics = training_call(q, k, v, bias, *options)
        wants_dbias = bias is not None
        return backward_call(
            q, k, v, bias, out, statistics, dout, *options, wants_dbias
        )

    def theirs(q, k, v, dout, *bias):
        def run(q, k, v, *bias):
            return jax.nn.dot_product_attention(
                q, k, v, *bias, scale=0.125, is_causal=causal,
                local_window_size=(window - 1, 0) if window else None,
                implementation="cudnn",
            )  # fmt: skip

        return jax.vjp(run, q, k, v, *bias)[1](dout)

    def calls_of(function) -> list[str]:
        lines = lowered(function, operands).splitlines()
        lines = [line.partition("stablehlo.custom_call")[2] for line in lines]
        return sorted(re.sub(r"%\w+(#\d)?", "", x) for x in lines if "__cudnn$" in x)

    try:
        expected = calls_of(theirs)
    except RuntimeError as error:
        pytest.skip(f"jax.nn needs the CUDA plugin: {error}")
    assert len(expected) == 2
    assert calls_of(ours) == expected


# [h200] in milliseconds, forward and backward: (B, S, D, causal) -> measured
MEASURED = {
    (2, 8192, 128, False): 6.176,
    (2, 8192, 128, True): 3.409,
    (4, 2048, 128, False): 0.873,
    (4, 2048, 128, True): 0.582,
    (4, 4096, 64, False): 2.102,
    (4, 4096, 64, True): 1.254,
}


@pytest.mark.parametrize("size", MEASURED)
def test_predictions(size: tuple) -> None:
    """Within 20% of what jax.nn's calls took on one H200, 16 heads, bfloat16."""
    b, s, d, causal = size
    spec = make_spec(b=b, t=s, s=s, k=16, g=1, d=d, dtype=HALF, causal=causal)
    grad = GradSpec(QKV, (HALF,) * 3, HALF)
    predicted = 1e3 * cudnn_grad.GRAD.seconds(spec, grad, H200)
    assert 0.8 < predicted / MEASURED[size] < 1.2
    scores = 2 * spec.score_count  # bytes
    assert 0 < cudnn_grad.GRAD.temp_bytes(spec, grad, H200) < scores / 4
