"""tokamax's own attention tests, run on `pallas_kernels.attention`.

They compare with flax's attention: values, gradients, bits of two runs, NaN in padded
keys, masks of every form. `pip install -e '.[tokamax]'` gets them; a class a backend.
`HLO_TOOLS_TOKAMAX_VMAP=1` also runs those that tokamax leaves out as too slow.
"""

import os
import warnings
from typing import Any

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import attention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("tokamax", reason="tokamax is not installed: extra tokamax")
    from tokamax._src import quantization
    from tokamax._src.ops.attention import base, test_base

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

# Tests of what `attention` has no form for.
SKIPPED = {
    "test_tanh_clipping0": "a softcap around scores and bias; here the bias is added"
    " to the capped scores, as models with both do",
}
SLOW_UPSTREAM = "Too slow for OSS"


def adapted(implementation: str) -> Any:
    """Returns `attention` with tokamax's arguments.

    Precision and dtype of the scores are not passed on: float32 operands are
    multiplied in float32, and scores are float32 always.
    """

    def attention_fn(
        q, k, v, *, bias=None, mask=None, is_causal=False, logits_scale=None,
        logits_soft_cap=None, q_indices=None, k_indices=None, dropout_mask=None,
        dropout_rate=0.0, normalize_output=True, return_residuals=False,
        precision=None, logits_dtype=None,
    ):  # fmt: skip
        if dropout_mask is not None or dropout_rate:
            raise NotImplementedError("dropout")
        q, k, v = (quantization.as_array(x) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if logits_scale is None else logits_scale
        out, lse = attention(
            q, k, v, bias=bias, scale=scale, softcap=logits_soft_cap,
            return_lse=True, implementation=implementation,
            **visibility(q, k, mask, is_causal, q_indices, k_indices),
        )  # fmt: skip
        if return_residuals:  # any pair (m, l) with m + log(l) = lse
            return out, (lse, jnp.ones_like(lse))
        if not normalize_output:
            scores = jnp.einsum("...thd,...shd->...hts", q, k, precision="highest")
            top = (scores * scale).max(-1)
            out = out * jnp.exp(lse - top).mT[..., None]
        return out

    return attention_fn


def visibility(q, k, mask, is_causal, q_indices, k_indices) -> dict[str, Any]:
    """Returns the arguments that say which keys a query sees."""
    if isinstance(mask, base.CausalMask):
        mask = base.Mask(causal_mask=mask)
    elif not isinstance(mask, base.Mask):
        mask = base.Mask(mask)
    if is_causal:
        mask &= base.CausalMask()
    found: dict[str, Any] = {}
    causal = mask.causal_mask
    if causal is not None and q_indices is None and k_indices is None:
        mask, _ = mask.take("causal_mask")
        window = causal.window_size
        left = None if window is None else (window - 1, None)
        found |= {"causal": True, "offset": causal.offset, "window": left}
    rows = q.shape[-3] if q_indices is None else q_indices
    columns = k.shape[-3] if k_indices is None else k_indices
    return {**found, "mask": mask.as_array(rows, columns)}


class Suite:
    """What the classes below share; each names its implementation."""

    implementation = ""

    def __init__(self, *args: Any):
        super().__init__(
            *args,
            attention_fn=adapted(self.implementation),
            supports_dropout=False,
        )

    def setUp(self) -> None:
        super().setUp()
        if self._testMethodName in SKIPPED:
            self.skipTest(SKIPPED[self._testMethodName])

    def skipTest(self, reason: str) -> None:
        if reason == SLOW_UPSTREAM and os.environ.get("HLO_TOOLS_TOKAMAX_VMAP"):
            return
        super().skipTest(reason)

    def test_normalize_output(self) -> None:
        # What `attention` does not return, so made of out and lse: its gradient is a
        # difference of terms as large as the sum of exponentials, some hundreds.
        with test_base.override_test_args(atol_grads=2e-4):
            super().test_normalize_output()


class TestReference(Suite, test_base.AttentionTestBase):
    implementation = "reference"


class TestOnline(Suite, test_base.AttentionTestBase):
    implementation = "online"


class TestTpu(Suite, test_base.AttentionTestBase):
    """Interpreted on a CPU, where the kernels multiply float32 as XLA does."""

    implementation = "tpu"

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(pltpu.force_tpu_interpret_mode())

    def test_self_attention2(self) -> None:
        self.skipTest("float16 is not supported on TPUs")
