"""The TPU kernel's numerics, in interpret mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_spellings import SPELLINGS

from hlo_tools import StableHloModule
from hlo_tools.driver import run_passes
from hlo_tools.passes.bind_kernels import rebuild_site
from hlo_tools.targets import Target
from pallas_kernels.attention import tpu

SUPPORTED = (
    "plain", "cross", "causal_tril_where", "causal_with_offset", "sliding_window",
    "window_absolute_distance", "softcap_causal", "gqa_grouped", "gqa_repeat",
)  # fmt: skip


def site_of(name):
    spelling = SPELLINGS[name]
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in spelling.shapes]
    text = jax.jit(spelling.function).lower(*types).as_text()
    module, _ = run_passes(
        StableHloModule.parse(text),
        "normalize,outline-attention",
        Target.parse("v5e"),
    )
    (function,) = [f for n, f in module.functions().items() if n != "main"]
    return module, rebuild_site(function)


@pytest.mark.parametrize("name", SUPPORTED)
def test_interpreted(name):
    module, site = site_of(name)
    spec = site.spec
    assert tpu.IMPLEMENTATION.supports(spec, Target.parse("v5e")) is None
    rng = np.random.default_rng(0)
    heads = spec.kv_heads * spec.group
    q = rng.standard_normal((spec.batch, spec.q_len, heads, spec.head_dim))
    k = rng.standard_normal((spec.batch, spec.k_len, spec.kv_heads, spec.head_dim))
    v = rng.standard_normal((spec.batch, spec.k_len, spec.kv_heads, spec.value_dim))
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    got = tpu.splash_attention(spec, q, k, v, interpret=True)
    scores = jnp.einsum(
        "btkgd,bskd->bkgts", q.reshape(*q.shape[:2], spec.kv_heads, -1, q.shape[-1]), k
    )
    scores = spec.score_mod(scores, (), jnp.arange(spec.q_len), jnp.arange(spec.k_len))
    want = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores), v).reshape(got.shape)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_refusals_have_reasons():
    v5e = Target.parse("v5e")
    for name in ("bias_per_head", "padding_mask", "clipped_scores", "decode"):
        _, site = site_of(name)
        assert tpu.IMPLEMENTATION.supports(site.spec, v5e)
