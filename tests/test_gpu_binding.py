"""The Hopper kernels as sites are bound to them: emulated, interpreted, on a GPU.

Emulated, the reference backend takes the kernels' place: what is asked of them adds
up to the site. Interpreted, the kernels themselves answer.
"""

import dataclasses
import types

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

import hlo_tools
from hlo_tools import StableHloModule, binding
from hlo_tools.composites import AttentionSpec, SideSpec
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


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", KERNEL_SITES)
def test_semantics(name: str) -> None:
    """What is asked of the kernels adds up to the site."""
    site = make_site(name, HALF)
    assert IMPLEMENTATION.supports(site.spec, H200) is None
    site.check(IMPLEMENTATION.build(site.spec, H200))


QUICK = ("no visible key for some, -inf", "no visible key for any", "alibi",
         "softcap, causal", "mask of keys, causal", "bias, mask, causal")  # fmt: skip


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
    "slopes": half_bias(1, 2, 2, 1, 1, fn=lambda sides, *positions: alibi(
        (sides[0].astype(jnp.float32),), *positions
    )) | {"bias_dtype": "float32"},
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
