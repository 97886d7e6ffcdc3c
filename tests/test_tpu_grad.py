"""The TPU kernels with their backward pass: interpreted, and compiled for TPUs."""

import dataclasses
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_sites import SITES, biased, error_of, make_spec, masked, relative_gate
from gradient_sites import QKV, make_grad_site
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding
from test_attention_implementations import TPU_REFUSED

from hlo_tools.composites import attention_ref
from hlo_tools.gradients import GradSpec, attention_grad_ref
from hlo_tools.targets import Target
from pallas_kernels.attention import tpu_grad
from pallas_kernels.attention.tpu_tiles import Form

V5E = Target.parse("v5e")
SLOW = pytest.mark.slow
QUICK = ("multi-query", "bias, mask, causal")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else SLOW)
        for name in SITES
        if name not in TPU_REFUSED
    ],
)
def test_interpreted(name: str) -> None:
    site = make_grad_site(name)
    if name == "one key":
        # P = 1: a plain program's zeros are exact, but rowsum(dout * out) and dP are
        # sums in two orders, and differ by roundings of the largest dP.
        values = site.site.inputs[2].repeat(site.site.spec.group, 2)  # [B,1,H,Dv]
        rounding = np.finfo(np.float32).eps * np.abs((site.dout * values).sum(-1)).max()
        limits = [x + 4 * rounding for x in site.limits[:2]]
        site = dataclasses.replace(site, limits=[*limits, site.limits[2]])
    with pltpu.force_tpu_interpret_mode():
        site.check(tpu_grad.GRAD, V5E)


@pytest.mark.slow
def test_bfloat16_and_parts_interpreted() -> None:
    with pltpu.force_tpu_interpret_mode():
        make_grad_site("causal", "bfloat16", ("v",)).check(tpu_grad.GRAD, V5E)
        make_grad_site("softcap", "bfloat16", ("q",)).check(tpu_grad.GRAD, V5E)


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high"), [(None, 0), (-140, 30), (None, -200)])
def test_several_tiles(low: int | None, high: int) -> None:
    """Tiles that are cut, skipped or seen whole, in both directions."""
    fields = {"window": (None if low is None else -low, high)}
    spec = make_spec(
        b=1, t=384, s=512, k=1, g=2, d=64, mask_fill=-1e30, scale=0.1,
        rows_never_empty=high >= 0, **fields,
    )  # fmt: skip
    grad = GradSpec(QKV, ("float32",) * 3, "float32")
    rng = np.random.default_rng(0)
    shapes = [(1, n, h, 64) for n, h in ((384, 2), (512, 1), (512, 1), (384, 2))]
    q, k, v, dout = (rng.standard_normal(x).astype(np.float32) for x in shapes)
    form = Form(0.1, None, low, high, 512, 128, 128)
    with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode():
        patch.setattr(tpu_grad, "BLOCKS", (128,))
        assert tpu_grad.make_form(spec) == form
        forward, backward = tpu_grad.GRAD.build(spec, grad, V5E)
        out, *residuals = jax.jit(forward)(q, k, v)
        got = jax.jit(backward)(q, k, v, out, *residuals, dout)
    assert error_of(out, np.asarray(attention_ref(spec, q, k, v))) < 1e-5
    expected = attention_grad_ref(spec, grad, q, k, v, dout)
    for a, b in zip(got, expected, strict=True):
        assert error_of(a, np.asarray(b)) < 2e-5 * max(1, np.abs(b).max())


@pytest.mark.slow
def test_scores_of_large_magnitude() -> None:
    """A row hidden by an additive mask keeps its probabilities, if equal ones.

    Its logsumexp would be that of its largest score: -1e9 + log(40) is -1e9.
    """
    spec = make_spec(b=1, k=1, g=1, **biased(1, 1, 1, 40, 40))
    grad = GradSpec(QKV, ("float32",) * 3, "float32")
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 40, 1, 16), np.float32) for _ in range(4))
    bias = np.where(rng.random((1, 1, 1, 40, 40)) < 0.5, 0, -1e9).astype(np.float32)
    bias[..., :7, :] = -1e9
    forward, backward = tpu_grad.GRAD.build(spec, grad, V5E)
    with pltpu.force_tpu_interpret_mode():
        out, *residuals = jax.jit(forward)(q, k, v, bias)
        got = jax.jit(backward)(q, k, v, bias, out, *residuals, dout)
    for a, b in zip(got, attention_grad_ref(spec, grad, q, k, v, bias, dout),
                    strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("low", "high", "block_q", "block_k"),
    [
        (None, 0, 128, 256),
        (-100, 0, 256, 128),
        (7, 300, 128, 128),
        (-9, None, 128, 512),
    ],
)
def test_visible_tiles(low, high, block_q: int, block_k: int) -> None:
    """A tile is computed iff something in it is visible, and then it is fetched."""
    t, s = 1024, 1536
    form = Form(1.0, None, low, high, s, block_q, block_k)
    distance = np.arange(s) - np.arange(t)[:, None]
    keep = np.ones((t, s), bool)
    keep &= True if low is None else distance >= low
    keep &= True if high is None else distance <= high
    rows, columns = t // block_q, s // block_k
    tiles = keep.reshape(rows, block_q, columns, block_k).any((1, 3))
    for i in range(rows):
        for j in range(columns):
            assert bool(form.is_visible(i, j)) == tiles[i, j]
            near_j = int(form.nearest_key_block(jnp.int32(i), jnp.int32(j), columns))
            near_i = int(form.nearest_query_block(jnp.int32(i), jnp.int32(j), rows))
            assert 0 <= near_j < columns
            assert 0 <= near_i < rows
            if tiles[i, j]:
                assert (near_i, near_j) == (i, j)
            if tiles[i].any():
                assert tiles[i, near_j]
            if tiles[:, j].any():
                assert tiles[near_i, j]


# name -> (keywords of make_spec, GradSpec's fields, what the reason has to mention)
ALL: tuple = (QKV, ("float32",) * 3, "float32")
REFUSALS = {
    "mixed dtypes": ({"v_dtype": "bfloat16"}, ALL, "differ"),
    "float16": ({"dtype": "float16"}, ALL, "float16"),
    "float64 cotangent": ({}, (QKV, ("float32",) * 3, "float64"), "float64"),
    "precise products": ({"precision": ("DEFAULT", "HIGHEST")}, ALL, "HIGHEST"),
    "score function": ({"named": False, "score_mod": relative_gate}, ALL, "modified"),
    "gradient of a bias": (
        biased(1, 2, 2, 40, 40), ((0,), ("float32",), "float32"), "biases",
    ),
    "float64 bias": (biased(1, 2, 2, 40, 40, bias_dtype="float64"), ALL, "float64"),
    "mild fill": ({"causal": True, "mask_fill": -3.0}, ALL, "-3.0"),
    "large head dim": ({"d": 264}, ALL, "264"),
    "nothing visible": ({"window": (3, 3), "offset": 1000}, ALL, "no query sees"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    keywords, fields, words = REFUSALS[name]
    reason = tpu_grad.GRAD.supports(make_spec(**keywords), GradSpec(*fields), V5E)
    assert reason is not None
    assert words in reason


def test_refuses_other_devices() -> None:
    reason = tpu_grad.GRAD.supports(make_spec(), GradSpec(*ALL), Target.parse("h200"))
    assert reason is not None
    assert "TPU" in reason


# name -> keywords: kernels of realistic size, which have to fit in VMEM
COMPILES = {
    "causal": {"causal": True},
    "window, softcap": {"causal": True, "window": (512, 0), "softcap": 30.0, "d": 256},
    "float32, bias": {
        **biased(1, 4, 2, 2048, 2048), "dtype": "float32", "d": 256, "softcap": 3.0,
    },
    "masks, odd sizes": masked(
        2, 1, 1, 1, 1999, t=1001, s=1999, rows_never_empty=False
    ),
    "value dim": {"d": 192, "dv": 128},
}  # fmt: skip
QUICK_COMPILES = (("causal", "v5e"), ("float32, bias", "v6e"), ("causal", "tpu7x"))


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in QUICK_COMPILES else SLOW)
        for name in COMPILES
        for kind in ("v5e", "v6e", "tpu7x")
    ],
)
def test_compiles(name: str, kind: str) -> None:
    target = Target.topology(kind)
    sizes = {"t": 2048, "s": 2048, "k": 4, "g": 2, "d": 128, "dtype": "bfloat16"}
    spec = make_spec(**{**sizes, **COMPILES[name]})
    grad = GradSpec(QKV, (spec.q_dtype,) * 3, spec.out_dtype)
    assert tpu_grad.GRAD.supports(spec, grad, target) is None
    forward, backward = tpu_grad.GRAD.build(spec, grad, target)

    def both(dout, *inputs):
        out, *residuals = forward(*inputs)
        return out, backward(*inputs, out, *residuals, dout)

    assert target.devices is not None
    on_device = SingleDeviceSharding(target.devices[0])
    rows = [
        (spec.q_len, spec.heads, spec.value_dim),  # dout
        (spec.q_len, spec.heads, spec.head_dim),
        (spec.k_len, spec.kv_heads, spec.head_dim),
        (spec.k_len, spec.kv_heads, spec.value_dim),
    ]
    shapes = [jax.ShapeDtypeStruct((2, *row), spec.q_dtype) for row in rows]
    shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in spec.sides]
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device) for x in shapes
    ]
    compiled = jax.jit(both).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3


def test_predictions() -> None:
    """Time grows with what is visible, and no scores are kept."""
    sizes = {"t": 4096, "s": 4096, "k": 8, "g": 1, "d": 128, "dtype": "bfloat16"}
    grad = GradSpec(QKV, ("bfloat16",) * 3, "bfloat16")
    full, causal = make_spec(**sizes), make_spec(causal=True, **sizes)
    ratio = tpu_grad.GRAD.seconds(causal, grad, V5E) / tpu_grad.GRAD.seconds(
        full, grad, V5E
    )
    assert 0.5 < ratio < 0.7
    assert 0 < tpu_grad.GRAD.temp_bytes(causal, grad, V5E) < causal.score_count
