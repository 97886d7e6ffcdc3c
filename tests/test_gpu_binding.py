"""The Hopper kernels as sites are bound to them: emulated, interpreted, on a GPU.

Emulated, the reference backend takes the kernels' place: what is asked of them adds
up to the site. Interpreted, the kernels themselves answer.

Length: tables of cases.
"""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_sites import (
    SITES,
    alibi,
    biased,
    last,
    make_site,
    make_spec,
    mask_side,
    masked,
    relative_gate,
)
from gradient_sites import BIAS_SITES, QKV, grad_site_of, half_bias, make_grad_site
from test_compile_only import run_on_h200_topology

import hlo_tools
from hlo_tools import StableHloModule, binding
from hlo_tools.composites import AttentionSpec, SideSpec, attention_ref
from hlo_tools.driver import run_passes
from hlo_tools.gradients import GradSpec, attention_grad_ref
from hlo_tools.targets import Target
from pallas_kernels import hopper
from pallas_kernels.attention import cost_gpu, gpu_binding, gpu_plan, reference
from pallas_kernels.attention.gpu_binding import GRAD, IMPLEMENTATION

H200 = Target.parse("h200")
HALF = "bfloat16"
SLOW = pytest.mark.slow
REFUSED_SITES = ("mild fill", "score function only")
KERNEL_SITES = [name for name in SITES if name not in REFUSED_SITES]
interpreted = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="the interpreter runs on CPUs"
)
requires_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")


def marked(names, *quick) -> list:
    return [pytest.param(name, marks=() if name in quick else SLOW) for name in names]


@pytest.fixture
def emulated(monkeypatch) -> None:
    emulate(monkeypatch)


def emulate(monkeypatch, **changes) -> None:
    """Puts the reference backend, with changes, in the place of the kernels."""
    backend = dataclasses.replace(reference.BACKEND, **changes)
    stand_in = types.SimpleNamespace(
        BACKEND=backend, forward_config=gpu_plan.kernels().forward_config
    )
    monkeypatch.setattr(gpu_binding, "kernels", lambda: stand_in)


QUICK = ("no visible key for some, -inf", "no visible key for any",
         "bias, mask, causal")  # fmt: skip


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", marked(KERNEL_SITES, *QUICK, "alibi", "softcap"))
def test_semantics(name: str) -> None:
    """What is asked of the kernels adds up to the site."""
    site = make_site(name, HALF)
    assert IMPLEMENTATION.supports(site.spec, H200) is None
    site.check(IMPLEMENTATION.build(site.spec, H200))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", marked(KERNEL_SITES, *QUICK))
def test_semantics_of_gradients(name: str) -> None:
    make_grad_site(name, HALF).check(GRAD, H200)


# Sites that have gradients of a bias beside those that cuDNN has too.
MORE_BIAS_SITES: dict[str, dict] = {
    "float32": biased(1, 2, 2, 40, 40, bias_dtype="float32"),
    "float32, batch and heads": biased(2, 2, 2, 40, 40, bias_dtype="float32"),
    "keys": half_bias(2, 1, 1, 1, 40),
    "queries": half_bias(1, 2, 2, 40, 1),
    "one number": half_bias(1, 1, 1, 1, 1),
    "groups share it": half_bias(1, 2, 1, 40, 40),
    "heads share it": half_bias(1, 1, 2, 40, 40),
    "slopes": half_bias(
        1,
        2,
        2,
        1,
        1,
        fn=lambda sides, *positions: alibi((sides[0].astype(jnp.float32),), *positions),
    )
    | {"bias_dtype": "float32"},
    "odd lengths": half_bias(1, 2, 2, 37, 53, t=37, s=53),
    "softcap": half_bias(1, 2, 2, 40, 40, softcap=1.5),
    "float16": biased(
        1, 2, 2, 40, 40, dtype="float16", bias_dtype="float16", q_dtype="float16"
    ),
}


def bias_site(name: str):
    if name in BIAS_SITES:
        return make_grad_site(name, HALF, (0, *QKV))
    fields = dict(MORE_BIAS_SITES[name])
    dtype = fields.pop("q_dtype", HALF)
    return grad_site_of(name, make_spec(**{"dtype": dtype, **fields}), (0, *QKV))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "name", marked([*BIAS_SITES, *MORE_BIAS_SITES], "dbias, mask", "slopes", "float32")
)
def test_semantics_of_dbias(name: str) -> None:
    bias_site(name).check(GRAD, H200)


def small(**fields) -> AttentionSpec:
    sizes = {"b": 1, "t": 24, "s": 24, "k": 1, "g": 1, "dtype": HALF}
    return make_spec(**{**sizes, **fields})


EMPTY = {"rows_never_empty": False}
# Sites of one tile or two, for the interpreter: the kinds that
# benchmarks/attention_grad_gpu.py checks on a GPU. "dbias ..." wants that of side 0.
INTERPRETED: dict[str, dict] = {
    "full": {},
    "causal": {"causal": True},
    "float16": {"causal": True, "dtype": "float16"},
    "float32 scores": {"causal": True, "score_dtype": "float32"},
    "grouped": {"causal": True, "g": 2},
    "head dim 64": {"causal": True, "d": 64},
    "head dim 72": {"d": 72},
    "head dim 128": {"d": 128},
    "value dim": {"d": 16, "dv": 40},
    "odd lengths, causal": {"t": 37, "s": 53, "causal": True},
    "one query": {"t": 1, "s": 30},
    "more keys, two tiles": {"t": 20, "s": 140, "causal": True},
    "window": {"causal": True, "window": (7, 0)},
    "two-sided window": {"window": (7, 3)},
    "offset": {"causal": True, "t": 12, "offset": 12},
    "empty rows": {"causal": True, "offset": -7, **EMPTY},
    "empty rows, -inf": {
        "causal": True, "offset": -7, "mask_fill": -np.inf, **EMPTY,
    },
    "mask": masked(1, 1, 1, 24, 24, **EMPTY),
    "mask, -inf": masked(1, 1, 1, 24, 24, mask_fill=-np.inf, **EMPTY),
    "mask of heads": masked(1, 1, 2, 24, 24, g=2, **EMPTY),
    "mask of keys, causal": masked(1, 1, 1, 1, 24, causal=True, **EMPTY),
    "softcap, causal": {"causal": True, "softcap": 1.5, "scale": 1.0},
    "bias of keys": half_bias(1, 1, 1, 1, 24),
    "float32 bias": biased(1, 1, 1, 24, 24, bias_dtype="float32"),
    "dbias of heads": half_bias(1, 1, 2, 24, 24, g=2),
    "dbias of neither": half_bias(1, 1, 1, 24, 24, b=2),
    "dbias of keys": half_bias(1, 1, 1, 1, 24, causal=True),
    "dbias, grouped": half_bias(1, 1, 1, 24, 24, g=2),
    "dbias, float32": biased(1, 1, 1, 24, 24, bias_dtype="float32"),
    "dbias, mask": {
        **half_bias(1, 1, 1, 24, 24),
        "has_mask": True, "mask_fn": last, **EMPTY,
        "sides": (SideSpec((1, 1, 1, 24, 24), HALF), *mask_side(1, 1, 1, 1, 24)),
    },
}  # fmt: skip
QUICK_INTERPRETED = ("empty rows", "mask of keys, causal", "dbias of heads")


def small_grad_site(name: str):
    wanted = (0, *QKV) if name.startswith("dbias") else QKV
    return grad_site_of(name, small(**INTERPRETED[name]), wanted)


@interpreted
@pytest.mark.parametrize("name", marked(INTERPRETED, *QUICK_INTERPRETED))
def test_interpreted(name: str) -> None:
    with hopper.interpret_mode(detect_races=False):
        small_grad_site(name).check(GRAD, H200)


@requires_gpu
@pytest.mark.parametrize("name", INTERPRETED)
def test_on_gpu(name: str) -> None:
    small_grad_site(name).check(GRAD, H200)


@requires_gpu
@pytest.mark.parametrize("dtype", [HALF, "float16"])
@pytest.mark.parametrize("name", KERNEL_SITES)
def test_sites_on_gpu(name: str, dtype: str) -> None:
    make_grad_site(name, dtype).check(GRAD, H200)


@requires_gpu
@pytest.mark.parametrize("name", [*BIAS_SITES, *MORE_BIAS_SITES])
def test_dbias_on_gpu(name: str) -> None:
    bias_site(name).check(GRAD, H200)


@pytest.mark.usefixtures("emulated")
def test_lost_rows() -> None:
    """Rows that an additive mask hides: right if they do not count, NaN if they do."""
    spec = make_spec(dtype=HALF, k=1, g=1, **biased(2, 1, 1, 1, 40))
    grad = GradSpec(QKV, (HALF,) * 3, HALF)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(x, (2, 40, 1, 16), HALF) for x in keys)
    bias = jnp.zeros((2, 1, 1, 1, 40)).at[0].set(-1e9).at[1, ..., 3].set(-1e9)
    forward, backward = map(jax.jit, GRAD.build(spec, grad, H200))
    out, statistics = forward(q, k, v, bias)
    counted = backward(q, k, v, bias, out, statistics, dout)
    dout = dout.at[0].set(0)
    expected = attention_grad_ref(spec, grad, q, k, v, bias, dout)
    left_out = backward(q, k, v, bias, out, statistics, dout)
    for a, b, c in zip(counted, left_out, expected, strict=True):
        assert jnp.isnan(a[0]).all()
        assert jnp.array_equal(a[1], b[1])
        assert jnp.abs(b - c).max() < 0.02 * jnp.abs(c).max()


@pytest.mark.usefixtures("emulated")
def test_infinite_bias() -> None:
    """-inf for some keys hides them; for all keys of a row, its softmax is NaN."""
    spec = make_spec(b=1, t=6, s=6, k=1, g=1, dtype=HALF, **biased(1, 1, 1, 6, 6))
    grad = GradSpec(QKV, (HALF,) * 3, HALF)
    q, k, v, dout = (
        jax.random.normal(x, (1, 6, 1, 16), HALF)
        for x in jax.random.split(jax.random.key(0), 4)
    )
    bias = jnp.zeros((1, 1, 1, 6, 6)).at[..., 2].set(-jnp.inf).at[..., 4, :].set(
        -jnp.inf
    )  # fmt: skip
    forward, backward = map(jax.jit, GRAD.build(spec, grad, H200))
    out, lse = forward(q, k, v, bias)
    expected = attention_ref(spec, q, k, v, bias)
    np.testing.assert_array_equal(jnp.isnan(out), jnp.isnan(expected))
    assert jnp.nanmax(jnp.abs(out - expected)) < 2e-2
    for gradient in backward(q, k, v, bias, out, lse, dout):
        assert jnp.isnan(gradient).any()


# name -> (keywords of make_spec, fields of GradSpec or nothing, words of the reason)
REFUSALS: dict[str, tuple[dict, tuple, str]] = {
    "float32": ({"dtype": "float32"}, (), "operands are float32"),
    "mixed dtypes": ({"v_dtype": "float16"}, (), "differ"),
    "exact probabilities": ({"probs_dtype": "float32"}, (), "probabilities"),
    "float32 result": ({"out_dtype": "float32"}, (), "result"),
    "float64 softmax": ({"softmax_dtype": "float64"}, (), "not in float64"),
    "float64 bias": (biased(1, 2, 2, 40, 40, bias_dtype="float64"), (), "float64"),
    "score function": ({"named": False, "score_mod": relative_gate}, (), "modified"),
    "mild fill": ({"causal": True, "mask_fill": -3.0}, (), "-3.0"),
    "large head dim": ({"d": 320}, (), "head_dim 320"),
    "no keys": ({"s": 0}, (), "an operand is empty"),
    "deep gradients": ({"d": 256}, (QKV, (HALF,) * 3, HALF), "above 128"),
    "float32 gradient": ({}, (("q", "k"), (HALF, "float32"), HALF), "of k: float32"),
    "float32 cotangent": ({}, (("q",), (HALF,), "float32"), "cotangent"),
    "precise products": (
        {"score_dtype": "float32", "precision": ("HIGHEST", "DEFAULT")},
        (QKV, (HALF,) * 3, HALF), "HIGHEST",
    ),
    "gradient of a bias wider than it": (
        half_bias(1, 2, 2, 40, 40), ((0,), ("float32",), HALF), "side 0 to bfloat16",
    ),
    "slopes in bfloat16": (
        half_bias(1, 2, 2, 1, 1, fn=alibi), ((0,), (HALF,), HALF), "summed after",
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
    if fields:
        assert IMPLEMENTATION.supports(spec, H200) is None
        reason = GRAD.supports(spec, GradSpec(*fields), H200)
    else:
        reason = IMPLEMENTATION.supports(spec, H200)
    assert reason is not None
    assert words in reason


def test_refuses_other_gpus() -> None:
    reason = IMPLEMENTATION.supports(make_spec(dtype=HALF), Target.parse("a100"))
    assert reason is not None
    assert "for Hopper GPUs" in reason


def test_a_jaxlib_without_mosaic(monkeypatch) -> None:
    def missing():
        raise ImportError("no module named mosaic")

    monkeypatch.setattr(gpu_plan, "kernels", missing)
    reason = IMPLEMENTATION.supports(make_spec(dtype=HALF), H200)
    assert reason == "its kernels can not be imported: no module named mosaic"


# name -> (keywords of make_spec, gradients or None, what is chosen on an H200)
CHOICES: dict[str, tuple[dict, tuple | None, str]] = {
    "mask": (masked(2, 1, 1, 4096, 4096), None, "mosaic-gpu"),
    "mask, training": (masked(2, 1, 1, 4096, 4096), QKV, "mosaic-gpu"),
    "mask of keys, training": (masked(2, 1, 1, 1, 4096), QKV, "mosaic-gpu"),
    "bias, training": (half_bias(1, 16, 1, 4096, 4096), QKV, "mosaic-gpu"),
    "softcap": ({"softcap": 30.0}, None, "mosaic-gpu"),
    "softcap, training": ({"softcap": 30.0, "causal": True}, QKV, "mosaic-gpu"),
    "two-sided window": ({"window": (200, 200)}, None, "mosaic-gpu"),
    "odd mask, training": (
        masked(2, 1, 1, 4095, 4096, t=4095), QKV, "mosaic-gpu",
    ),
    "dbias of heads": (half_bias(1, 16, 1, 4096, 4096), (0, *QKV), "cudnn"),
    "dbias in float32": (
        biased(1, 16, 1, 4096, 4096, bias_dtype="float32"), (0, *QKV), "mosaic-gpu",
    ),
    "head dim 96": ({"d": 96}, None, "cudnn"),
    "head dim 256, training": ({"d": 256}, QKV, "cudnn"),
    "grouped, training": ({"k": 4, "g": 4, "causal": True}, QKV, "cudnn"),
    "decode": ({"b": 32, "t": 1}, None, "cudnn"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    keywords, wanted, expected = CHOICES[name]
    sizes = {"t": 4096, "s": 4096, "k": 16, "g": 1, "d": 128, "dtype": HALF}
    spec = make_spec(**{**sizes, "softmax_dtype": "float32", **keywords})
    grad = None
    if wanted is not None:
        own = [HALF if isinstance(n, str) else spec.sides[n].dtype for n in wanted]
        grad = GradSpec(wanted, tuple(own), HALF)
    choice = binding.choose("hlo_tools.attention", spec, H200, grad)
    assert choice.implementation is not None, choice.reason
    assert choice.implementation.name == expected, choice.candidates
    for candidate in choice.candidates:
        assert candidate.supported or candidate.reason


def test_predictions_follow_the_table() -> None:
    """The faster the row says, the less the prediction; memory is what is kept."""
    spec = make_spec(t=2048, s=2048, k=8, g=1, d=128, dtype=HALF)
    grad = GradSpec(QKV, (HALF,) * 3, HALF)
    capped = dataclasses.replace(spec, softcap=30.0)
    deep = dataclasses.replace(spec, head_dim=96, value_dim=96)
    rows = cost_gpu.FACTORS["softcap"]
    for number, seconds in enumerate((
        lambda s: IMPLEMENTATION.seconds(s, H200), lambda s: GRAD.seconds(s, grad, H200)
    )):  # fmt: skip
        assert seconds(spec) / seconds(capped) == pytest.approx(rows[number])
    assert IMPLEMENTATION.temp_bytes(spec, H200) == 4 * 2 * 8 * 2048
    assert IMPLEMENTATION.temp_bytes(deep, H200) > IMPLEMENTATION.temp_bytes(spec, H200)
    scores = 2 * spec.score_count  # bytes
    assert 0 < GRAD.temp_bytes(spec, grad, H200) < scores / 4


def training_step(params, x, keys):
    """A small model in the manner of Flax: one attention, padding masked."""

    def loss(params):
        q, k, v = (jnp.einsum("btc,chd->bthd", x, w) for w in params["qkv"])
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * 64**-0.5
        s = jnp.where(keys[:, None, None, :], s, -1e30)
        p = jax.nn.softmax(s).astype(v.dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", p, v)
        out = jnp.einsum("bthd,hdc->btc", out, params["out"])
        return jnp.square((out - x).astype(jnp.float32)).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)


def step_shapes(**options):
    def array(*shape: int, dtype: Any = HALF):
        return jax.ShapeDtypeStruct(shape, dtype, **options)

    weights = [array(512, 8, 64)] * 3
    return (
        {"qkv": weights, "out": array(8, 64, 512)},
        array(8, 1024, 512),
        array(8, 1024, dtype=bool),
    )


@pytest.mark.parametrize("x64", [False, True])
def test_training_step_is_bound(x64: bool) -> None:
    """By the cost model alone, through all passes; anywhere, without a GPU."""
    with jax.enable_x64(x64):
        text = jax.jit(training_step).lower(*step_shapes()).as_text()
        module, report = run_passes(StableHloModule.parse(text), "default", H200)
    module.module.operation.verify()
    (site,) = report.sites
    assert (site.status, site.implementation) == ("bound", "mosaic-gpu"), site.reason
    assert site.gradient_bound
    assert site.config["block_kv"] % 64 == 0
    assert site.bytes_saved > 0
    assert module.as_text().count("stablehlo.custom_call @mosaic_gpu") == 2


def compile_training_step(device) -> str:
    """Compiles it for a device; returns what was bound and how often it is called."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    step = hlo_tools.jit(training_step)
    text = step.lower(*step_shapes(sharding=sharding)).compile().as_text() or ""
    (site,) = step.report().sites
    calls = text.count('custom_call_target="mosaic_gpu')
    return f"{site.status} {site.implementation} {calls}"


def test_training_step_compiles(shared_dir) -> None:
    output = run_on_h200_topology(
        shared_dir,
        "import test_gpu_binding as b;"
        "print(b.compile_training_step(target.devices[0]))",
    )
    assert output.split() == ["bound", "mosaic-gpu", "2"]
