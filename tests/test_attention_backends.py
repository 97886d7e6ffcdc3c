"""The backends behind `pallas_kernels.attention`: which is chosen, and why not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DEFAULTS, make_case
from test_cudnn_grad import emulated_backward_call, emulated_training_call

from hlo_tools.errors import UnsupportedError
from hlo_tools.targets import Target
from pallas_kernels import attention
from pallas_kernels.attention import backends, cudnn_backend
from pallas_kernels.attention.arguments import make_problem
from pallas_kernels.attention.feature_table import feature_table

SLOW = pytest.mark.slow

# cuDNN, emulated: what is asked of it

CUDNN_CASES = (
    "causal", "causal, empty rows", "causal window", "window", "mask", "bias",
    "bias of heads", "segments, causal", "lengths", "sinks, empty rows",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "sinks, empty rows" else SLOW)
        for name in CUDNN_CASES
    ],
)
def test_cudnn(monkeypatch, name: str) -> None:
    monkeypatch.setattr(cudnn_backend, "training_call", emulated_training_call)
    monkeypatch.setattr(cudnn_backend, "backward_call", emulated_backward_call)
    make_case(name, "bfloat16", with_lse=False).check(implementation="cudnn")


def test_cudnn_refuses_the_gradient_of_lse() -> None:
    x = jnp.ones((1, 8, 1, 8), jnp.bfloat16)

    def loss(x):
        return attention(x, x, x, return_lse=True, implementation="cudnn")[1].sum()

    with pytest.raises(UnsupportedError, match="cudnn: it has no gradient of the log"):
        jax.grad(loss)(x)


# Choosing a backend


def test_rows_of_the_table() -> None:
    for name in backends.BACKENDS:
        backend = backends.load_backend(name)
        assert backend.name == name
        assert set(backend.platforms) <= {"cpu", "gpu", "tpu"}


def test_readme_has_the_table_of_features(repo_dir) -> None:
    assert feature_table() in (repo_dir / "README.md").read_text()


def test_default_is_the_first_that_can() -> None:
    x = jnp.ones((1, 4, 1, 8))
    problem = make_problem_of(x)
    chosen = backends.Candidates.of(None).forward(problem)
    assert chosen.name == "online"
    empty = make_problem_of(jnp.ones((0, 4, 1, 8)))
    assert backends.Candidates.of(None).forward(empty).name == "reference"


def make_problem_of(x):
    return make_problem(x, x, x, **DEFAULTS)[0]


def test_every_refusal_is_told() -> None:
    x = jnp.ones((0, 4, 1, 8))
    with pytest.raises(UnsupportedError, match=r"attention on cpu:\n  online: an op"):
        attention(x, x, x, implementation="online")
    names = [name for name in backends.BACKENDS if name != "reference"]
    with pytest.raises(UnsupportedError) as caught:
        attention(x, x, x, implementation=names)
    for name in names:
        assert f"\n  {name}: " in str(caught.value)


def test_missing_package_is_a_reason(monkeypatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "other", "no_such_package.kernels:BACKEND")
    x = jnp.ones((1, 4, 1, 8))
    with pytest.raises(UnsupportedError, match="other: it can not be imported"):
        attention(x, x, x, implementation=["other"])
    out = attention(x, x, x, implementation=["other", "reference"])
    np.testing.assert_allclose(out, x)


def test_backward_falls_through(monkeypatch) -> None:
    """A backend without a backward pass leaves it to the next, unless it is alone."""
    reference = backends.load_backend("reference")

    def refuse(problem, target, wants_bias):
        return "no backward pass"

    half = dataclasses.replace(reference, name="half", supports_backward=refuse)
    moody = dataclasses.replace(reference, name="moody", deterministic=False)
    found = {"half": half, "moody": moody}
    for name in found:
        monkeypatch.setitem(backends.BACKENDS, name, "")
    load = backends.load_backend
    monkeypatch.setattr(
        backends, "load_backend", lambda name: found.get(name) or load(name)
    )
    x = np.random.default_rng(0).standard_normal((1, 6, 2, 8)).astype(np.float32)

    def grad(**options):
        return jax.grad(lambda x: attention(x, x, x, **options).sum())(x)

    with pytest.raises(UnsupportedError, match="half: no backward pass"):
        grad(implementation="half")
    np.testing.assert_allclose(
        grad(implementation=["half", "online"]), grad(implementation="online"), 1e-5
    )
    grad(implementation="moody")
    with pytest.raises(UnsupportedError, match="moody: its gradients are not determ"):
        grad(implementation="moody", deterministic=True)


def test_single_name_is_taken_at_its_word(monkeypatch) -> None:
    """On a device of another platform; in a list it is refused."""
    seen = []

    def supports(problem, target: Target):
        seen.append(target.platform)

    reference = backends.load_backend("reference")
    other = dataclasses.replace(reference, platforms=("tpu",), supports=supports)
    monkeypatch.setattr(backends, "load_backend", lambda name: other)
    x = jnp.ones((1, 4, 1, 8))
    attention(x, x, x, implementation="reference")
    assert set(seen) == {"tpu"}
    with pytest.raises(UnsupportedError, match="reference: it runs on tpu, not on cpu"):
        attention(x, x, x, implementation=["reference"])
