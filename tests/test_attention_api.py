"""`pallas_kernels.attention`: all backends on shared cases, and all transforms."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, error_of, make_case
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import attention
from pallas_kernels.attention.online_tiling import Blocks

SLOW = pytest.mark.slow
SMALL_TILES = Blocks(1, 1, 16, 16)
# name -> options of `attention`
WAYS = {
    "reference": {"implementation": "reference"},
    "online": {"implementation": "online"},
    "online, small tiles": {"implementation": "online", "config": SMALL_TILES},
}
# The others run with `-m slow`.
QUICK = {
    "reference": {"everything"},
    "online": {"bias of keys", "everything"},
    "online, small tiles": {"causal, more queries", "lengths", "everything"},
}


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=() if name in QUICK[way] else SLOW)
        for way, name in itertools.product(WAYS, CASES)
    ],
)
def test_case(way: str, name: str) -> None:
    make_case(name).check(**WAYS[way])


@pytest.mark.parametrize(
    ("way", "dtype", "name"),
    [
        ("online", "bfloat16", "everything"),
        pytest.param("reference", "bfloat16", "everything", marks=SLOW),
        pytest.param("online, small tiles", "float16", "everything", marks=SLOW),
        *(
            pytest.param(way, dtype, name, marks=SLOW)
            for way in WAYS
            for dtype in ("bfloat16", "float16")
            for name in ("full", "causal", "softcap", "bias", "sinks")
        ),
    ],
)
def test_narrow_dtypes(way: str, dtype: str, name: str) -> None:
    make_case(name, dtype).check(**WAYS[way])


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=SLOW if "," not in way else ()) for way in WAYS]
)
def test_float64(way: str) -> None:
    with jax.enable_x64(True):
        make_case("everything", "float64").check(**WAYS[way])


def test_reference_against_loops() -> None:
    """The reference itself, against sums over single keys in Python."""
    case = make_case("everything")
    x = {k: np.asarray(v, np.float64) for k, v in case.arguments.items() if k in "qkv"}
    a = case.arguments
    b_n, t_n, h_n, _ = x["q"].shape
    for b, t, h in itertools.product(range(b_n), range(t_n), range(h_n)):
        weights, values = [math.exp(a["sinks"][h])], [np.zeros(x["v"].shape[-1])]
        for s in range(x["k"].shape[1]):
            distance = s - (t + a["offset"])
            seen = a["mask"][b, 0, t, s] and distance <= 0
            seen &= distance >= -a["window"][0]
            seen &= a["q_segment_ids"][b, t] == a["kv_segment_ids"][b, s]
            seen &= t < a["q_lengths"][b] and s < a["kv_lengths"][b]
            if seen:
                score = a["scale"] * float(x["q"][b, t, h] @ x["k"][b, s, h // 2])
                score = a["softcap"] * math.tanh(score / a["softcap"])
                weights.append(math.exp(score + float(a["bias"][0, h, t, s])))
                values.append(x["v"][b, s, h // 2])
        total = sum(weights)
        out = sum(w * v for w, v in zip(weights, values, strict=True)) / total
        np.testing.assert_allclose(case.expected["out"][b, t, h], out, atol=1e-12)
        np.testing.assert_allclose(
            case.expected["lse"][b, h, t], math.log(total), atol=1e-12
        )


def test_gradients_by_differences() -> None:
    """The expected gradients, against finite differences in float64."""
    case = make_case("everything")
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        wide = {
            k: v.astype(np.float64) if getattr(v, "dtype", "") == np.float32 else v
            for k, v in case.arguments.items()
        }

        def loss(arguments) -> float:
            out, lse = attention(
                **arguments, return_lse=True, implementation="reference"
            )
            lse = jnp.where(jnp.isfinite(lse), lse, 0)
            return float((out * case.dout).sum() + (lse * case.dlse).sum())

        for name in ("q", "k", "v", "bias", "sinks"):
            step = rng.standard_normal(wide[name].shape) * 1e-5
            ends = [{**wide, name: wide[name] + sign * step} for sign in (1, -1)]
            slope = (loss(ends[0]) - loss(ends[1])) / 2
            along = float((case.expected[name] * step).sum())
            np.testing.assert_allclose(slope, along, rtol=1e-6)


# Batch dims and layouts


@pytest.mark.parametrize("lead", [(), (2, 3), (1, 2, 2)])
def test_batch_dims(lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((*lead, n, h, 8)).astype(np.float32)
        for n, h in ((6, 4), (9, 2), (9, 2))
    )
    bias = rng.standard_normal((*lead[:1], *(1,) * len(lead[1:]), 4, 6, 9))
    bias = bias.astype(np.float32)
    lengths = rng.integers(1, 10, lead)
    run = functools.partial(attention, return_lse=True, implementation="reference")
    out, lse = run(q, k, v, bias=bias, kv_lengths=lengths)
    assert out.shape == (*lead, 6, 4, 8)
    assert lse.shape == (*lead, 4, 6)
    for index in np.ndindex(*lead):
        at = tuple(i if n > 1 else 0 for i, n in zip(index, bias.shape, strict=False))
        one = run(
            q[index], k[index], v[index], bias=bias[at], kv_lengths=lengths[index]
        )
        np.testing.assert_allclose(out[index], one[0], atol=1e-6)
        np.testing.assert_allclose(lse[index], one[1], atol=1e-6)


@pytest.mark.parametrize("sizes", [(0, 5, 3, 4), (2, 0, 3, 4), (2, 5, 0, 4)])
def test_empty_operands(sizes: tuple[int, ...]) -> None:
    b, t, s, h = sizes
    q, k = jnp.ones((b, t, h, 8)), jnp.ones((b, s, h, 8))

    def loss(q, k):
        out, lse = attention(q, k, k, return_lse=True)
        assert out.shape == q.shape
        assert lse.shape == (b, h, t)
        return out.sum()

    for grad in jax.grad(loss, argnums=(0, 1))(q, k):
        assert not np.any(grad)


def test_nan_in_hidden_keys_and_queries_stays_there() -> None:
    case = make_case("lengths")
    a = dict(case.arguments)
    hidden = np.arange(40)[None] >= a["kv_lengths"][:, None]
    a["q"] = np.where((np.arange(24) >= a["q_lengths"][:, None])[..., None, None],
                      np.nan, a["q"])  # fmt: skip
    a["k"] = np.where(hidden[..., None, None], np.nan, a["k"])
    a["v"] = np.where(hidden[..., None, None], np.float32(3e38), a["v"])
    a = {k: v.astype(np.float32) if k in "qkv" else v for k, v in a.items()}
    for options in WAYS.values():
        out = attention(**a, **options)
        assert error_of(out, case.expected["out"]) <= case.limits["out"]


@pytest.mark.parametrize("way", ["reference", "online"])
def test_rows_hidden_by_a_bias_are_not_wrong(way: str) -> None:
    """Their logsumexp, -1e9, has lost the sum: NaN, unless nothing comes from them."""
    q, k, v = arrays((1, 6, 1, 8), (1, 9, 1, 8), (1, 9, 1, 8))
    bias = np.where(np.arange(6)[:, None] < 2, np.float32(-1e9), np.float32(0))

    def loss(q, rows):
        out = attention(q, k, v, bias=bias[None, None], **WAYS[way])
        return (out[:, rows] ** 2).sum()

    grad = jax.grad(loss)(q, slice(0, None))
    assert np.isnan(grad[0, :2]).all()
    assert np.isfinite(grad[0, 2:]).all()
    assert np.isfinite(jax.grad(loss)(q, slice(2, None))).all()


def test_no_score_matrix_in_online() -> None:
    """Memory grows with T + S: the same call at four times the length."""

    def temp_bytes(length: int) -> int:
        q = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(q, ids):
            return attention(
                q, q, q, causal=True, q_segment_ids=ids, kv_segment_ids=ids,
                implementation="online",
            ).sum()  # fmt: skip

        compiled = jax.jit(jax.grad(loss)).lower(q, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes(16384) < 6 * temp_bytes(4096)
    assert temp_bytes(16384) < 16384 * 16384 / 4


# Transforms


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def call(way: str, q, k, v, bias, mask, sinks):
    return attention(
        q, k, v, bias=bias, mask=mask, sinks=sinks, causal=True, **WAYS[way]
    )


def loss_of(way: str, *operands):
    return (call(way, *operands) ** 2).sum()


@pytest.mark.parametrize("way", [pytest.param("reference", marks=SLOW), "online"])
def test_nested_vmap_and_vmap_of_grad(way: str) -> None:
    q, k, v, bias, sinks = arrays(
        (3, 2, 2, 12, 4, 8), (3, 2, 2, 14, 2, 8), (2, 14, 2, 8), (3, 1, 4, 12, 14),
        (3, 4),
    )  # fmt: skip
    mask = np.random.default_rng(1).random((2, 2, 1, 12, 14)) < 0.7
    inner, outer = (0, 0, None, None, 0, None), (0, 0, None, 0, None, 0)
    wanted = (0, 1, 2, 3, 5)
    grad = jax.grad(functools.partial(loss_of, way), argnums=wanted)

    def twice(function):
        return jax.jit(jax.vmap(jax.vmap(function, inner), outer))

    operands = (q, k, v, bias, mask, sinks)
    out = twice(functools.partial(call, way))(*operands)
    grads = twice(grad)(*operands)
    for n, m in np.ndindex(3, 2):
        one = (q[n, m], k[n, m], v, bias[n], mask[m], sinks[n])
        np.testing.assert_allclose(out[n, m], call("reference", *one), atol=1e-5)
        expected = jax.grad(functools.partial(loss_of, "reference"), wanted)(*one)
        for got, exact in zip(grads, expected, strict=True):
            np.testing.assert_allclose(got[n, m], exact, atol=5e-5)

    def whole(*operands):
        return (twice(functools.partial(call, way))(*operands) ** 2).sum()

    shared = jax.grad(whole, argnums=(2, 3))(*operands)
    np.testing.assert_allclose(shared[0], grads[2].sum((0, 1)), atol=3e-4)
    np.testing.assert_allclose(shared[1], grads[3].sum(1), atol=3e-4)


def test_vmap_over_lengths_segments_and_lse() -> None:
    q, k, v = arrays((2, 12, 4, 8), (2, 14, 2, 8), (2, 14, 2, 8))
    lengths = np.array([[3, 14], [7, 1], [0, 9]])
    segments = np.array([segment % 2 for segment in range(12)])

    def run(lengths, implementation):
        return attention(
            q, k, v, kv_lengths=lengths, q_segment_ids=segments,
            kv_segment_ids=np.arange(14) % 2, return_lse=True,
            implementation=implementation,
        )  # fmt: skip

    got = jax.vmap(functools.partial(run, implementation="online"))(lengths)
    for n, row in enumerate(lengths):
        for x, exact in zip(got, run(row, "reference"), strict=True):
            assert error_of(x[n], np.asarray(exact, np.float64)) < 1e-5


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=SLOW)])
def test_shard_map(check_vma: bool) -> None:
    """Batch and heads sharded; bias and sinks shared by some of the devices."""
    q, k, v, bias, sinks = arrays(
        (8, 16, 4, 8), (8, 16, 2, 8), (8, 16, 2, 8), (1, 4, 16, 16), (4,)
    )
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = P("data", None, "tensor")
    specs = (rows, rows, rows, P(None, "tensor"), P(), P("tensor"))
    mask = np.ones((1, 1, 1, 16), bool)
    operands = (q, k, v, bias, mask, sinks)
    sharded = jax.shard_map(
        functools.partial(call, "online"),
        mesh=mesh, in_specs=specs, out_specs=rows, check_vma=check_vma,
    )  # fmt: skip

    def loss(*operands):
        return (sharded(*operands) ** 2).sum()

    wanted = (0, 1, 2, 3, 5)
    got = jax.jit(jax.value_and_grad(loss, wanted))(*operands)
    expected = jax.value_and_grad(functools.partial(loss_of, "reference"), wanted)(
        *operands
    )
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    for x, exact in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(x, exact, atol=1e-4)


@pytest.mark.parametrize("way", [pytest.param("reference", marks=SLOW), "online"])
def test_scan_and_checkpoint(way: str) -> None:
    (x,) = arrays((2, 12, 4, 8))

    def loss(x, layer, loop):
        if loop:
            return jax.lax.scan(lambda x, _: (layer(x), None), x, None, 3)[0].sum()
        return layer(layer(layer(x))).sum()

    def layer(x):
        return x + attention(x, x, x, causal=True, **WAYS[way])

    got = jax.jit(jax.grad(lambda x: loss(x, jax.checkpoint(layer), True)))(x)
    expected = np.asarray(jax.grad(loss)(x, layer, False))
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def test_gradient_of_lse_alone() -> None:
    q, k, v = arrays((2, 12, 4, 8), (2, 14, 2, 8), (2, 14, 2, 8))

    def loss(q, k, v, implementation):
        return attention(
            q, k, v, return_lse=True, implementation=implementation
        )[1].sum()  # fmt: skip

    got = jax.grad(loss, (0, 1, 2))(q, k, v, "online")
    wide = k.repeat(2, 2)

    def plain(q):
        scores = jnp.einsum("bthd,bshd->bhts", q, wide) / 8**0.5
        return jax.nn.logsumexp(scores, -1).sum()

    np.testing.assert_allclose(got[0], jax.grad(plain)(q), atol=1e-6)
    assert not np.any(got[2])
