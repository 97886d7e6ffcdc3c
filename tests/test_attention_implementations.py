"""Every attention implementation against the reference, over a table of sites.

The rule: the error against float64 is at most twice that of the same computation
done plainly in the site's own dtypes, plus a small absolute term.
"""

import functools
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from hlo_tools.composites import (
    AttentionSpec,
    SideSpec,
    attention_ref,
    modified_scores,
)
from hlo_tools.targets import Target
from pallas_kernels.attention import cost, cudnn, online, rows, tpu

CPU = Target.parse("cpu")
ATOL = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4}


def make_spec(
    b=2, t=40, s=40, k=2, g=2, d=16, dv=None, dtype="float32", **fields
) -> AttentionSpec:
    """A site whose parts all have one dtype, except what `fields` says."""
    names = ("q", "k", "v", "score", "softmax", "probs", "out")
    dtypes = {f"{name}_dtype": dtype for name in names}
    sizes = {
        "batch": b, "q_len": t, "k_len": s, "kv_heads": k, "group": g,
        "head_dim": d, "value_dim": dv or d,
    }  # fmt: skip
    defaults = {"scale": d**-0.5, **dtypes, **sizes}
    if fields.get("causal") or fields.get("window") or fields.get("has_mask"):
        defaults["mask_fill"] = -1e30 if dtype != "float16" else -6e4
    return AttentionSpec(**{**defaults, **fields})


def first(sides, q_pos, k_pos):
    return sides[0]


def last(sides, q_pos, k_pos):
    return sides[-1]


def alibi(sides, q_pos, k_pos):
    slopes = sides[0]  # [1,K,G,1,1]
    return slopes * (k_pos[None, :] - q_pos[:, None]).astype(slopes.dtype)


def until_length(sides, q_pos, k_pos):
    return k_pos < sides[0]  # [B,1,1,1,1]


def relative_gate(scores, sides, q_pos, k_pos):
    """No named form: tanh of the score plus a distance term, and a parity mask."""
    distance = (k_pos[None, :] - q_pos[:, None]).astype(scores.dtype)
    x = 2 * jnp.tanh(0.3 * scores) + sides[0].astype(scores.dtype)
    x = x - 0.01 * jnp.abs(distance)
    keep = (q_pos[:, None] + k_pos[None, :]) % 3 != 0
    return jnp.where(keep, x, -jnp.inf)


def mask_side(*shape, dtype="bool"):
    return (SideSpec(shape, dtype),)


def masked(*shape, fn=first, **fields):
    return {"has_mask": True, "mask_fn": fn, "sides": mask_side(*shape), **fields}


def biased(*shape, dtype="float32", fn=first, **fields):
    sides = (SideSpec(shape, dtype),)
    return {"has_bias": True, "bias_fn": fn, "sides": sides, **fields}


# name -> keywords of make_spec
SITES: dict[str, dict] = {
    "full": {},
    "one head, one batch": {"b": 1, "k": 1, "g": 1},
    "multi-query": {"k": 1, "g": 4},
    "value dim": {"d": 16, "dv": 24},
    "prime sizes": {"t": 37, "s": 53, "d": 7, "k": 3, "g": 1},
    "odd lengths": {"t": 37, "s": 53, "causal": True},
    "one key": {"s": 1},
    "decode": {"t": 1, "s": 77},
    "decode, grouped": {"t": 1, "s": 77, "k": 2, "g": 4},
    "causal": {"causal": True},
    "causal, more keys": {"causal": True, "t": 24, "s": 61},
    "causal, more queries": {"causal": True, "t": 61, "s": 24},
    "causal, offset": {"causal": True, "t": 24, "s": 61, "offset": 37},
    "causal, -inf": {"causal": True, "mask_fill": -np.inf},
    "window": {"window": (5, 3)},
    "window to the left": {"window": (9, None)},
    "causal window": {"causal": True, "window": (9, 0), "t": 50, "s": 50},
    "causal window, offset": {
        "causal": True, "window": (6, None), "t": 10, "s": 50, "offset": 40,
    },
    "no visible key for some": {
        "causal": True, "offset": -7, "rows_never_empty": False,
    },
    "no visible key for some, -inf": {
        "causal": True, "offset": -7, "rows_never_empty": False,
        "mask_fill": -np.inf,
    },
    "no visible key for any": {
        "window": (3, 3), "offset": 1000, "rows_never_empty": False,
    },
    "softcap": {"softcap": 2.0, "scale": 1.0},
    "softcap, causal": {"softcap": 2.0, "causal": True},
    "mask": masked(2, 1, 1, 40, 40, rows_never_empty=False),
    "mask, -inf": masked(2, 1, 1, 40, 40, mask_fill=-np.inf, rows_never_empty=False),
    "mask of keys": masked(2, 1, 1, 1, 40, rows_never_empty=False),
    "mask of keys, causal": masked(
        2, 1, 1, 1, 40, causal=True, rows_never_empty=False
    ),
    "mask per head": masked(1, 2, 2, 40, 40, rows_never_empty=False),
    "mild fill": masked(2, 1, 1, 40, 40, mask_fill=-3.0, causal=True),
    "lengths": {
        "has_mask": True, "mask_fn": until_length, "t": 1, "s": 64,
        "sides": mask_side(2, 1, 1, 1, 1, dtype="int32"),
    },
    "bias": biased(2, 2, 2, 40, 40),
    "bias, shared": biased(1, 2, 2, 40, 40),
    "bias of keys": biased(2, 1, 1, 1, 40, causal=True),
    "alibi": biased(1, 2, 2, 1, 1, fn=alibi, causal=True),
    "bias, mask, causal": {
        "has_bias": True, "has_mask": True, "bias_fn": first, "mask_fn": last,
        "causal": True, "rows_never_empty": False,
        "sides": (SideSpec((1, 2, 2, 40, 40), "float32"), *mask_side(2, 1, 1, 1, 40)),
    },
    "score function only": {
        "named": False, "score_mod": relative_gate, "t": 29, "s": 45,
        "sides": (SideSpec((1, 2, 1, 29, 45), "float32"),),
    },
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Site:
    """A spec, random inputs for it, what is expected of them, and the limit.

    Attributes:
      expected: in float64.
      limit: the largest error allowed.
    """

    spec: AttentionSpec
    inputs: list[np.ndarray]
    expected: np.ndarray
    limit: float

    def check(self, function: Callable) -> None:
        with jax.enable_x64(self.spec.compute_dtype == jnp.float64):
            got = jax.jit(function)(*self.inputs)
        assert got.dtype == self.spec.out_dtype
        assert got.shape == self.expected.shape
        assert error_of(got, self.expected) <= self.limit


@functools.cache
def make_site(name: str, dtype: str = "float32") -> Site:
    """Makes the site of a row of SITES, and works out its reference once."""
    return site_of(name, make_spec(**{"dtype": dtype, **SITES[name]}))


def site_of(name: str, spec: AttentionSpec) -> Site:
    """Makes the site of a spec; its name is the seed of the inputs."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    heads = (spec.heads, spec.kv_heads, spec.kv_heads)
    lengths = (spec.q_len, spec.k_len, spec.k_len)
    depths = (spec.head_dim, spec.head_dim, spec.value_dim)
    dtypes = (spec.q_dtype, spec.k_dtype, spec.v_dtype)
    inputs = [
        rng.standard_normal((spec.batch, n, h, d)).astype(jnp.dtype(dtype))
        for n, h, d, dtype in zip(lengths, heads, depths, dtypes, strict=True)
    ]
    inputs += [random_side(rng, side, spec) for side in spec.sides]
    with jax.enable_x64(True):
        wide = [
            x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in inputs
        ]
        expected = np.asarray(jax.jit(functools.partial(attention_ref, spec))(*wide))
    with jax.enable_x64(spec.compute_dtype == jnp.float64):
        plain = jax.jit(functools.partial(plain_attention, spec))(*inputs)
    limit = 2 * error_of(plain, expected) + ATOL[spec.out_dtype]
    return Site(spec, inputs, expected, limit)


def random_side(rng, side: SideSpec, spec: AttentionSpec) -> np.ndarray:
    if side.dtype == "bool":
        mask = rng.random(side.shape) < 0.6
        if spec.rows_never_empty:
            mask[..., 0] = True
        elif side.shape[3] > 1:
            mask[..., :3, :] = False
        else:
            mask[0] = False
        return mask
    if side.dtype == "int32":
        return rng.integers(1, spec.k_len + 1, side.shape).astype(np.int32)
    return rng.standard_normal(side.shape).astype(jnp.dtype(side.dtype))


def plain_attention(spec: AttentionSpec, q, k, v, *sides):
    """What a program would write, in the site's own dtypes."""
    q = q.reshape(*q.shape[:2], spec.kv_heads, spec.group, spec.head_dim)
    scores = jnp.einsum(
        "btkgd,bskd->bkgts", q, k, preferred_element_type=spec.score_dtype
    )
    q_pos, k_pos = (jnp.arange(n, dtype=jnp.int32) for n in (spec.q_len, spec.k_len))
    x = modified_scores(spec, scores, sides, q_pos, k_pos)
    probs = jax.nn.softmax(x.astype(spec.softmax_dtype), axis=-1)
    out = jnp.einsum("bkgts,bskd->btkgd", probs.astype(spec.probs_dtype), v)
    return out.reshape(*out.shape[:2], spec.heads, -1).astype(spec.out_dtype)


def error_of(got, expected: np.ndarray) -> float:
    """The largest error; NaN has to stand where NaN is expected, and only there."""
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    return float(np.nan_to_num(np.abs(got - expected)).max())


# Small enough for several blocks along every dimension, the last ones partial.
SMALL_BLOCKS = online.Blocks(batch=1, kv_heads=1, queries=16, keys=16)
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
    site.check(lambda *a: online.online_attention(site.spec, blocks, True, *a))


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
    tile = online.Blocks(1, 2, 16, 16)
    for widen in (True, False):  # narrow products are for GPUs and TPUs
        site.check(functools.partial(online.online_attention, site.spec, tile, widen))


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
