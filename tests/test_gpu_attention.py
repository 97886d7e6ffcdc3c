"""The kernels for Hopper GPUs: interpreted with race detection, and on a GPU."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from attention_cases import CASES, DEFAULTS, make_case
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from hlo_tools.errors import UnsupportedError
from hlo_tools.targets import Target
from pallas_kernels import attention, hopper
from pallas_kernels.attention import backends, gpu, gpu_family
from pallas_kernels.attention.arguments import make_problem
from pallas_kernels.attention.gpu import BACKEND, whole_backward
from pallas_kernels.attention.gpu_backward import flash_backward
from pallas_kernels.attention.gpu_backward_plan import BackwardConfig
from pallas_kernels.attention.gpu_family import FORWARD
from pallas_kernels.attention.gpu_forward import flash_forward
from pallas_kernels.attention.gpu_forward_plan import ForwardConfig
from pallas_kernels.attention.gpu_presets import backward_inputs
from pallas_kernels.attention.problem import AttentionProblem
from pallas_kernels.attention.reference import attention_grads_ref, attention_ref

SLOW = pytest.mark.slow
QUICK = ("everything", "several tiles", "causal, empty rows")


def has_gpu() -> bool:
    return jax.default_backend() == "gpu"


needs_gpu = pytest.mark.skipif(not has_gpu(), reason="no GPU")
interpreted = pytest.mark.skipif(has_gpu(), reason="the interpreter runs on CPUs")


def no_races() -> bool:
    return not interpret_pallas_call.get_races().races_found


def blocks_share_sums(arguments: dict[str, Any]) -> bool:
    """Whether blocks add to the same place in memory.

    The interpreter has no such addition: it finds races that the copy engine's are not.
    """
    problem, _ = make_problem(**{**DEFAULTS, **arguments})
    config = gpu_family.choose_backward(whole_backward(problem))
    return problem.k_len > config.block_kv or problem.bias is not None


@interpreted
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in CASES]
)
def test_case(name: str) -> None:
    case = make_case(name, "bfloat16")
    with hopper.interpret_mode():
        case.check(implementation="mosaic-gpu")
    assert no_races() or blocks_share_sums(case.arguments)


@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_case_on_gpu(name: str, dtype: str) -> None:
    make_case(name, dtype).check(implementation="mosaic-gpu")


def problem_of(**fields: Any) -> AttentionProblem:
    sizes = {"batch": 1, "q_len": 200, "k_len": 136, "heads": 1, "kv_heads": 1}
    depths = {"head_dim": 64, "value_dim": 64, "dtype": "bfloat16", "scale": 0.2}
    return AttentionProblem(**{**sizes, **depths, **fields})


def check_forward(problem: AttentionProblem, config: ForwardConfig, **options) -> None:
    operands = backward_inputs(problem, 0)[0]
    run = functools.partial(flash_forward, problem, config, **options)
    out, lse = run(operands) if options else jax.jit(run)(operands)
    expected, expected_lse = attention_ref(problem, operands)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5, rtol=2e-5)
    assert np.abs(np.asarray(out, np.float32) - np.asarray(expected)).max() < 2e-2


SCHEDULES = [
    ForwardConfig(64, 2, groups, persistent, overlap)
    for groups, persistent, overlap in (
        (1, True, False), (1, False, True), (2, True, True), (2, False, False),
        (3, True, False), (3, False, True),
    )
]  # fmt: skip


@interpreted
@pytest.mark.parametrize(
    "config", [pytest.param(c, marks=SLOW if n > 2 else ()) for n, c in
               enumerate(SCHEDULES)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("band", [{}, {"causal": True, "window": (70, None)}])
def test_schedules(config: ForwardConfig, band: dict) -> None:
    with hopper.interpret_mode():
        check_forward(problem_of(**band), config, interpret=True)
    assert no_races()


DEEP: dict[str, dict[str, Any]] = {
    "several tiles": {"causal": True},
    "grouped": {"heads": 2, "window": (70, 50), "segments": True},
    "softcap, mask": {"softcap": 2.0, "mask": (1, 1, 200, 136)},
    "few columns of q": {"head_dim": 64, "value_dim": 256},
    "few columns of v": {"head_dim": 192, "value_dim": 128, "causal": True},
}


@pytest.mark.parametrize("two_kernels", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOW if i else ()) for i, n in enumerate(DEEP)]
)
def test_deep_gradients(name: str, two_kernels: bool) -> None:
    """Head dims above 128; interpreted, or on a GPU."""
    problem = problem_of(**{"head_dim": 256, "value_dim": 256, **DEEP[name]})
    operands, _, _, dout = backward_inputs(problem, 0)
    out, lse = attention_ref(problem, operands)
    delta = (out * dout).sum(-1).swapaxes(1, 2).astype("float32")
    with contextlib.nullcontext() if has_gpu() else hopper.interpret_mode():
        found = BACKEND.backward(
            problem, None, operands, lse, delta, dout, False, two_kernels
        )
    expected = attention_grads_ref(problem, operands, lse, delta, dout)
    for got, want in zip(found[:3], expected[:3], strict=True):
        want = np.asarray(want, np.float32)
        assert got.shape == want.shape
        error = np.abs(np.asarray(got, np.float32) - want).max()
        assert error < 2e-2 * np.abs(want).max()


@needs_gpu
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("band", [{}, {"causal": True, "window": (700, None)}])
def test_configurations_on_gpu(depth: int, band: dict) -> None:
    sizes = {"q_len": 1000, "k_len": 1100, "heads": 4, "kv_heads": 2, "batch": 2}
    problem = problem_of(**sizes, head_dim=depth, value_dim=depth, **band)
    for config in FORWARD.candidates(problem, Target.parse("h200"))[::3]:
        assert isinstance(config, ForwardConfig)
        check_forward(problem, config)


@pytest.fixture
def deterministic(monkeypatch) -> None:
    """The backend as it is to be once all of it has run on a GPU."""
    offered = dataclasses.replace(BACKEND, deterministic=True)
    load = backends.load_backend
    monkeypatch.setattr(gpu, "OFFER_UNTRIED", True)
    monkeypatch.setattr(
        backends,
        "load_backend",
        lambda name: offered if name == "mosaic-gpu" else load(name),
    )


TWO_KERNELS = ("everything", "several tiles", "causal", "bias of heads", "bias of keys")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=SLOW if i else ()) for i, n in enumerate(TWO_KERNELS)],
)
@pytest.mark.usefixtures("deterministic")
def test_deterministic_gradients(name: str) -> None:
    """Nothing is added in any order: no races even where the interpreter adds."""
    with contextlib.nullcontext() if has_gpu() else hopper.interpret_mode():
        make_case(name, "bfloat16").check(
            implementation="mosaic-gpu", deterministic=True
        )
    assert has_gpu() or no_races()


@needs_gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("depth", [64, 128, 256])
def test_runs_agree_on_gpu(depth: int) -> None:
    q, k, v = (
        jax.random.normal(key, (2, 1500, 4, depth), "bfloat16")
        for key in jax.random.split(jax.random.key(0), 3)
    )

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def grads(q, k, v):
        out = attention(
            q, k, v, causal=True, implementation="mosaic-gpu", deterministic=True
        )
        return (out.astype("float32") ** 2).sum()

    first = grads(q, k, v)
    for _ in range(3):
        for a, b in zip(first, grads(q, k, v), strict=True):
            np.testing.assert_array_equal(a, b)


@interpreted
@pytest.mark.parametrize(
    "config", [BackwardConfig(64, 2, 1), BackwardConfig(128, 2, 2),
               BackwardConfig(64, 2, 2, two_kernels=True),
               pytest.param(BackwardConfig(64, 1, 1), marks=SLOW)], ids=str,
)  # fmt: skip
def test_backward_configurations(config: BackwardConfig) -> None:
    problem = problem_of(causal=True, k_len=100)
    operands, _, _, dout = backward_inputs(problem, 0)
    out, lse = attention_ref(problem, operands)
    delta = (out * dout).sum(-1).swapaxes(1, 2).astype("float32")
    with hopper.interpret_mode():
        found = flash_backward(
            problem, config, operands, lse, delta, dout, interpret=True
        )
    expected = attention_grads_ref(problem, operands, lse, delta, dout)
    for got, want in zip(found[:3], expected[:3], strict=True):
        want = np.asarray(want, np.float32)
        assert np.abs(np.asarray(got, np.float32) - want).max() < 2e-2 * want.max()


@pytest.mark.parametrize(
    ("fields", "device", "words"),
    [
        ({}, "a100", "for Hopper GPUs"),
        ({}, "v5e", "for Hopper GPUs"),
        ({"dtype": "float32"}, "h200", "operands are float32"),
        ({"head_dim": 320}, "h200", "head_dim 320 is above 256"),
        ({"k_len": 0}, "h200", "an operand is empty"),
        ({"head_dim": 0}, "h200", "an operand is empty"),
        ({"bias": (1, 1, 200, 136), "bias_dtype": "float64"}, "h200", "bias is"),
    ],
)
def test_refusals(fields: dict, device: str, words: str) -> None:
    reason = BACKEND.supports(problem_of(**fields), Target.parse(device))
    assert reason is not None
    assert words in reason


def test_deep_gradients_are_refused(monkeypatch) -> None:
    sides = {"bias": (1, 1, 200, 136), "bias_dtype": "bfloat16"}
    problem, target = problem_of(head_dim=256, **sides), Target.parse("h200")
    assert BACKEND.supports(problem, target) is None
    for wants_bias in (False, True):
        reason = BACKEND.supports_backward(problem, target, wants_bias)
        assert reason is not None
        assert "have not run on a GPU yet" in reason
    monkeypatch.setattr(gpu, "OFFER_UNTRIED", True)
    assert BACKEND.supports_backward(problem, target, False) is None
    reason = BACKEND.supports_backward(problem, target, True)
    assert reason is not None
    assert "no gradient of a bias" in reason


def test_a_wrong_configuration() -> None:
    q = np.zeros((1, 8, 1, 64), jax.numpy.bfloat16)
    with pytest.raises(UnsupportedError, match="expected a ForwardConfig"):
        attention(q, q, q, implementation="mosaic-gpu", config=(1, 2))
