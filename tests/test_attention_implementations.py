"""Every attention implementation against the reference, over a table of sites.

The sites and the rule are in attention_sites.py.
"""

import functools
import re
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from attention_sites import (
    CPU,
    SITES,
    biased,
    error_of,
    make_site,
    make_spec,
    masked,
    relative_gate,
)
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from hlo_tools.targets import Target
from pallas_kernels.attention import (
    cost,
    cudnn,
    online,
    online_forward,
    online_tiling,
    rows,
    tpu,
)

# Small enough for several blocks along every dimension, the last ones partial.
SMALL_BLOCKS = online_tiling.Blocks(batch=1, kv_heads=1, queries=16, keys=16)
ROW_BLOCKS = {
    "one": rows.RowBlocks(2, 2, 64, 1),
    "several": rows.RowBlocks(1, 1, 16, 1),
    "grouped": rows.RowBlocks(1, 2, 8, 3),
}
BOUND_SITES = ("full", "one head, one batch", "decode, grouped", "causal", "mild fill",
               "score function only")  # fmt: skip
BY_ROWS = [name for name in SITES if name not in ("mild fill", "score function only")]
ROW_SITES = ("full", "causal, more keys", "causal, more queries", "causal window",
             "no visible key for some", "alibi")  # fmt: skip
DTYPE_SITES = ("causal, offset", "bias, mask, causal")


@pytest.mark.parametrize("name", BOUND_SITES)
def test_online(name: str) -> None:
    site = make_site(name)
    site.check(online.IMPLEMENTATION.build(site.spec, CPU))


@pytest.mark.parametrize("name", SITES)
def test_online_in_tiles(name: str) -> None:
    site = make_site(name)
    blocks = SMALL_BLOCKS._replace(
        queries=min(16, site.spec.q_len), keys=min(16, site.spec.k_len)
    )
    site.check(lambda *a: online_forward.online_attention(site.spec, blocks, True, *a))


@pytest.mark.parametrize(
    ("name", "blocks"),
    [(name, "several") for name in BY_ROWS]
    + [(name, b) for name in ROW_SITES for b in ("one", "grouped")],
)
def test_rows(name: str, blocks: str) -> None:
    site, wanted = make_site(name), ROW_BLOCKS[blocks]
    spec = site.spec
    fitted = wanted._replace(
        batch=min(wanted.batch, spec.batch),
        kv_heads=wanted.kv_heads if spec.kv_heads % wanted.kv_heads == 0 else 1,
        queries=min(wanted.queries, spec.q_len),
        groups=min(wanted.groups, spec.q_len),
    )
    site.check(lambda *a: rows.row_attention(spec, fitted, *a))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", DTYPE_SITES)
def test_online_dtypes(name: str, dtype: str) -> None:
    site = make_site(name, dtype)
    site.check(online.IMPLEMENTATION.build(site.spec, CPU))
    tile = online_tiling.Blocks(1, 2, 16, 16)
    for widen in (True, False):  # narrow products are for GPUs and TPUs
        site.check(
            functools.partial(online_forward.online_attention, site.spec, tile, widen)
        )


def test_online_mixed_dtypes() -> None:
    """bfloat16 operands, float32 softmax and probabilities: nothing is rounded."""
    spec = make_spec(
        dtype="bfloat16", causal=True, score_dtype="float32",
        softmax_dtype="float32", probs_dtype="float32", out_dtype="float32",
    )  # fmt: skip
    full = make_site("causal", "bfloat16")
    for target in ("cpu", "h200", "v5e"):
        function = online.IMPLEMENTATION.build(spec, Target.parse(target))
        got = jax.jit(function)(*full.inputs)
        assert got.dtype == jnp.float32
        assert error_of(got, full.expected) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_online_keeps_no_scores(causal: bool) -> None:
    """Temporary memory is far below the scores, also in XLA's own accounting."""
    spec = make_spec(b=1, t=4096, s=4096, k=8, g=1, d=64, causal=causal)
    shapes = [jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)] * 3
    function = online.IMPLEMENTATION.build(spec, CPU)
    compiled = jax.jit(function).lower(*shapes).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert temp < 4 * spec.score_count / 4
    assert online.IMPLEMENTATION.temp_bytes(spec, CPU) < 4 * spec.score_count / 4


def test_online_trace_is_small() -> None:
    spec = make_spec(t=4096, s=4096, causal=True)
    shapes = [jax.ShapeDtypeStruct((2, 4096, h, 16), jnp.float32) for h in (4, 2, 2)]
    for target in ("cpu", "h200"):
        function = online.IMPLEMENTATION.build(spec, Target.parse(target))
        text = jax.jit(function).lower(*shapes).as_text()
        assert text.count(" = stablehlo.") < 400


NOT_CUDNN = (
    "mild fill",
    "score function only",
    "softcap",
    "softcap, causal",
    "no visible key for any",
    "prime sizes",  # among them the head dim
)
CUDNN_SITES = [name for name in SITES if name not in NOT_CUDNN]


@pytest.mark.parametrize("name", ["causal", "decode", "bias, mask, causal"])
def test_cudnn_lowers_anywhere(name: str) -> None:
    """One custom call, no Python callback in it, on a machine without a GPU."""
    spec, target = make_site(name, "bfloat16").spec, Target.parse("h200")
    assert cudnn.IMPLEMENTATION.supports(spec, target) is None
    function = cudnn.IMPLEMENTATION.build(spec, target)
    shapes = [
        jax.ShapeDtypeStruct((spec.batch, n, h, d), spec.q_dtype)
        for n, h, d in (
            (spec.q_len, spec.heads, spec.head_dim),
            (spec.k_len, spec.kv_heads, spec.head_dim),
            (spec.k_len, spec.kv_heads, spec.value_dim),
        )
    ]
    shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in spec.sides]
    traced = jax.jit(function).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmha") == 1
    assert text.count("stablehlo.custom_call") == 1


def emulated_custom_call(q, k, v, bias, scale, causal, window):
    """What cuDNN's kernel computes, as seen on an H200 (cuDNN 9, jax 0.11.2)."""
    wide = jnp.float32
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    x = jnp.einsum("bthd,bshd->bhts", q.astype(wide), k.astype(wide)) * scale
    if bias is not None:
        assert bias.ndim == 4
        assert bias.shape[0] in (1, q.shape[0])
        assert bias.shape[1] in (1, q.shape[2])
        assert bias.shape[2:] == (q.shape[1], k.shape[1])
        x = x + bias.astype(wide)
    distance = jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None]
    assert causal or not window
    assert not window or q.shape[1] <= k.shape[1]
    keep = (distance <= 0) & (distance > -(window or k.shape[1] + q.shape[1]))
    x = jnp.where(keep, x, -jnp.inf) if causal else x
    probs = jax.nn.softmax(x, axis=-1).astype(v.dtype).astype(wide)
    return jnp.einsum("bhts,bshd->bthd", probs, v.astype(wide)).astype(v.dtype)


@pytest.mark.parametrize("name", CUDNN_SITES)
def test_cudnn_semantics(name: str, monkeypatch) -> None:
    """What is asked of cuDNN adds up to the site, in whatever form it is asked."""
    monkeypatch.setattr(cudnn, "custom_call", emulated_custom_call)
    site = make_site(name, "bfloat16")
    site.check(cudnn.IMPLEMENTATION.build(site.spec, Target.parse("h200")))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CUDNN_SITES)
def test_cudnn(name: str, dtype: str) -> None:
    site = make_site(name, dtype)
    site.check(cudnn.IMPLEMENTATION.build(site.spec, Target.parse("h200")))


# name -> (keywords, what the reason has to mention)
CUDNN_REFUSALS = {
    "float32": ({"dtype": "float32"}, "float32"),
    "exact probabilities": ({"probs_dtype": "float32"}, "probabilities"),
    "float32 result": ({"out_dtype": "float32"}, "result"),
    "odd head dim": ({"d": 12}, "head dim 12"),
    "large head dim": ({"d": 264}, "head dim 264"),
    "softcap": ({"softcap": 30.0}, "softcap"),
    "score function": ({"named": False, "score_mod": relative_gate}, "modified"),
    "mild fill": ({"causal": True, "mask_fill": -3.0}, "-3.0"),
    "nothing visible": ({"window": (3, 3), "offset": 1000}, "no query sees"),
    "mixed dtypes": ({"v_dtype": "float16"}, "differ"),
}


@pytest.mark.parametrize("name", CUDNN_REFUSALS)
def test_cudnn_refuses(name: str) -> None:
    keywords, words = CUDNN_REFUSALS[name]
    spec = make_spec(**{"dtype": "bfloat16", **keywords})
    reason = cudnn.IMPLEMENTATION.supports(spec, Target.parse("h200"))
    assert reason is not None
    assert words in reason


def test_cudnn_call_is_that_of_jax() -> None:
    """Configuration and layouts are those that jax.nn writes."""
    shapes = [jax.ShapeDtypeStruct((2, 64, h, 64), jnp.bfloat16) for h in (4, 2, 2)]

    def ours(q, k, v):
        return cudnn.custom_call(q, k, v, None, 0.125, True, 0)

    def theirs(q, k, v):
        return jax.nn.dot_product_attention(
            q, k, v, scale=0.125, is_causal=True, implementation="cudnn"
        )

    def call_of(function) -> str:
        traced = jax.jit(function).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        (line,) = (line for line in text.splitlines() if "__cudnn$fmha" in line)
        return line[line.index("stablehlo.custom_call") :]

    try:
        expected = call_of(theirs)
    except RuntimeError as error:
        pytest.skip(f"jax.nn needs the CUDA plugin: {error}")
    names = r"%\w+"
    assert re.sub(names, "", call_of(ours)) == re.sub(names, "", expected)


SLOW = pytest.mark.slow
TPU_QUICK = ("causal, offset", "mask of keys, causal", "bias, mask, causal")
TPU_REFUSED = ("mild fill", "score function only", "no visible key for any")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in TPU_QUICK else SLOW)
        for name in SITES
        if name not in TPU_REFUSED
    ],
)
def test_tpu_interpreted(name: str) -> None:
    site, target = make_site(name), Target.parse("v5e")
    assert tpu.IMPLEMENTATION.supports(site.spec, target) is None
    with pltpu.force_tpu_interpret_mode():
        site.check(tpu.IMPLEMENTATION.build(site.spec, target))


@pytest.mark.parametrize("name", TPU_REFUSED)
def test_tpu_refuses(name: str) -> None:
    spec = make_site(name).spec
    assert tpu.IMPLEMENTATION.supports(spec, Target.parse("v5e"))


# name -> keywords: kernels of realistic size, which have to fit in VMEM
TPU_COMPILES = {
    "splash": {"causal": True, "window": (512, 0), "softcap": 30.0, "d": 256},
    "flash": {"causal": True, "score_dtype": "float32", "d": 128},
    "flash, bias": biased(1, 8, 2, 2048, 2048, d=128),
    "splash, masks": masked(2, 1, 1, 1, 2048, window=(99, 0), d=64),
}
TPU_QUICK_COMPILES = (("splash", "v5e"), ("flash", "tpu7x"))


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name, kind, marks=() if (name, kind) in TPU_QUICK_COMPILES else SLOW
        )
        for name in TPU_COMPILES
        for kind in ("v5e", "v6e", "tpu7x")
    ],
)
def test_tpu_compiles(name: str, kind: str) -> None:
    target = Target.topology(kind)
    sizes = {"t": 2048, "s": 2048, "k": 8, "g": 2, "dtype": "bfloat16"}
    spec = make_spec(**{**sizes, **TPU_COMPILES[name]})
    assert tpu.IMPLEMENTATION.supports(spec, target) is None
    assert tpu.IMPLEMENTATION.config(spec, target)["kernel"] == name.partition(",")[0]
    assert target.devices is not None
    on_device = SingleDeviceSharding(target.devices[0])
    shapes = [
        jax.ShapeDtypeStruct((2, 2048, h, spec.head_dim), spec.q_dtype)
        for h in (16, 8, 8)
    ]
    shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in spec.sides]
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device) for x in shapes
    ]
    traced = jax.jit(tpu.IMPLEMENTATION.build(spec, target)).trace(*shapes)
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    assert "tpu_custom_call" in compiled.as_text()


# (target, sizes, implementation) -> whether it has to be predicted faster
CROSSOVERS = {
    "cpu, tiny": ("cpu", online, {"t": 64, "s": 64, "b": 4, "k": 8, "g": 1}, False),
    "cpu, long": ("cpu", online, {"t": 1024, "s": 1024, "k": 8, "g": 1}, True),
    "cpu, decode": ("cpu", online, {"t": 1, "s": 512, "k": 8, "g": 1}, False),
    "h200": ("h200", cudnn, {"t": 2048, "s": 2048, "causal": True}, True),
    "h200, decode": ("h200", cudnn, {"b": 32, "t": 1, "s": 4096, "g": 4}, True),
    "h200, online": ("h200", online, {"t": 2048, "s": 2048}, False),
    "v5e": ("v5e", tpu, {"t": 4096, "s": 4096, "causal": True}, True),
}


@pytest.mark.parametrize("name", CROSSOVERS)
def test_cost_crossovers(name: str) -> None:
    kind, module, sizes, faster = CROSSOVERS[name]
    target = Target.parse(kind)
    dtype = "float32" if kind == "cpu" else "bfloat16"
    spec = make_spec(**{"d": 64, "dtype": dtype, **sizes})
    assert module.IMPLEMENTATION.supports(spec, target) is None
    seconds = module.IMPLEMENTATION.seconds(spec, target)
    assert (seconds < 0.95 * cost.naive_seconds(spec, target)) == faster
    assert module.IMPLEMENTATION.temp_bytes(spec, target) >= 0
    assert cost.naive_temp_bytes(spec, target) > 0
