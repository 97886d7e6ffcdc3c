"""What the backward pass of "online" attention needs: memory, trace, predicted time."""

import jax
import jax.numpy as jnp
import pytest
from attention_grad_sites import GRAD, online_as_bound
from attention_sites import (
    CPU,
    make_spec,
)

from hlo_tools.gradients import GradSpec
from hlo_tools.targets import Target
from pallas_kernels.attention import cost_grad


@pytest.mark.parametrize("causal", [False, True])
def test_no_scores_in_memory(causal: bool) -> None:
    """In XLA's own accounting, of both halves."""
    size = {"b": 1, "t": 2048, "s": 2048, "k": 8, "g": 1, "d": 64}
    spec = make_spec(causal=causal, **size)
    grad = GradSpec(("q", "k", "v"), ("float32",) * 3, "float32")
    array = jax.ShapeDtypeStruct((1, 2048, 8, 64), jnp.float32)
    row = jax.ShapeDtypeStruct((1, 8, 2048), jnp.float32)
    forward, backward = online_as_bound(spec, grad)
    arguments = (array,) * 3, (*(array,) * 4, row, row, array)
    scores = 4 * spec.score_count
    for half, shapes in zip((forward, backward), arguments, strict=True):
        compiled = jax.jit(half).lower(*shapes).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < scores / 4
    assert GRAD.temp_bytes(spec, grad, CPU) < scores / 4
    assert cost_grad.naive_grad_temp_bytes(spec, grad, CPU) >= scores


def test_trace_is_small() -> None:
    spec = make_spec(t=4096, s=4096, causal=True)
    grad = GradSpec(("q", "k", "v"), ("float32",) * 3, "float32")
    q, k = (jax.ShapeDtypeStruct((2, 4096, h, 16), jnp.float32) for h in (4, 2))
    row = jax.ShapeDtypeStruct((2, 4, 4096), jnp.float32)
    for target in ("cpu", "h200"):
        _, backward = GRAD.build(spec, grad, Target.parse(target))
        text = jax.jit(backward).lower(q, k, k, q, row, row, q).as_text()
        assert text.count(" = stablehlo.") < 600


# XLA's own code on one H200, bfloat16 with a float32 softmax under a mask:
# (B, S, H, D, causal) -> milliseconds of forward and backward
MEASURED = {
    (2, 8192, 16, 128, False): 14.61,
    (2, 8192, 16, 128, True): 22.50,
    (4, 4096, 16, 64, False): 7.34,
    (4, 4096, 16, 64, True): 11.19,
    (4, 2048, 16, 128, False): 2.16,
    (4, 2048, 16, 128, True): 2.89,
}


@pytest.mark.parametrize("size", MEASURED)
def test_cost_of_plain_code(size: tuple) -> None:
    b, s, h, d, causal = size
    spec = make_spec(
        b=b, t=s, s=s, k=h, g=1, d=d, dtype="bfloat16", causal=causal,
        softmax_dtype="float32",
    )  # fmt: skip
    grad = GradSpec(("q", "k", "v"), ("bfloat16",) * 3, "bfloat16")
    seconds = cost_grad.naive_grad_seconds(spec, grad, Target.parse("h200"))
    assert 0.8 < seconds * 1e3 / MEASURED[size] < 1.25


# (target, sizes) -> whether "online" has to be predicted faster
CROSSOVERS = {
    "cpu, long": ("cpu", {"t": 1024, "s": 1024, "k": 8, "g": 1}, True),
    "cpu, causal": ("cpu", {"t": 512, "s": 512, "k": 8, "causal": True}, True),
    "cpu, short": ("cpu", {"t": 128, "s": 128, "k": 12, "g": 1}, False),
    "cpu, tiny": ("cpu", {"t": 32, "s": 32, "b": 8, "k": 4, "g": 1}, False),
    "h200": ("h200", {"t": 2048, "s": 2048}, False),
}


@pytest.mark.parametrize("name", CROSSOVERS)
def test_cost_crossovers(name: str) -> None:
    kind, sizes, faster = CROSSOVERS[name]
    target = Target.parse(kind)
    dtype = "float32" if kind == "cpu" else "bfloat16"
    spec = make_spec(**{"d": 64, "dtype": dtype, **sizes})
    grad = GradSpec(("q", "k", "v"), (dtype,) * 3, dtype)
    assert GRAD.supports(spec, grad, target) is None
    seconds = GRAD.seconds(spec, grad, target)
    naive = cost_grad.naive_grad_seconds(spec, grad, target)
    assert (seconds < 0.95 * naive) == faster
