"""tokamax's own attention tests, run on `pallas_kernels.attention`.

They compare with flax's attention: values, gradients, bits of two runs, NaN in padded
keys, masks of every form. `pip install -e '.[tokamax]'` gets them; a class a backend.
`HLO_TOOLS_TOKAMAX_VMAP=1` also runs those that tokamax leaves out as too slow, and
`HLO_TOOLS_TOKAMAX_INTERPRET=1` all on the interpreted kernels for Hopper GPUs.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import attention, hopper
from pallas_kernels.attention.backends import Candidates
from pallas_kernels.attention.gpu import FLAT_DEPTH

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
HALF = ("bfloat16", "float16")
# Of the tests on the kernels for Hopper GPUs, those that end within a minute or two
# when interpreted: (2, 1024, 4, 64) takes 28 s forward, and minutes backward.
INTERPRETED = (
    "test_small_sequences",
    "test_non_power_of_two_q_seq_len",
    "test_padding_mask_with_nans",
)


def has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def adapted(implementation: str | tuple[str, ...]) -> Any:
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
            scores = jnp.einsum(
                "...thd,...shd->...hts", q, k, precision="highest",
                preferred_element_type=jnp.float32,
            )  # fmt: skip
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

    implementation: str | tuple[str, ...] = ""

    def __init__(self, *args: Any):
        super().__init__(
            *args,
            attention_fn=self.adapted(),
            supports_dropout=False,
        )

    def adapted(self) -> Any:
        return adapted(self.implementation)

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

    def test_logits_dtype1(self) -> None:
        self.skipTest("float16 is not supported on TPUs")


@contextlib.contextmanager
def sums_in_any_order() -> Iterator[None]:
    """Lets two runs differ in dq and dbias, to which blocks add in any order."""
    exactly = test_base.chex.assert_trees_all_equal

    def equal(actual: Any, expected: Any) -> None:
        if isinstance(actual, dict):
            actual, expected = dict(actual), dict(expected)
            for name in ("dq", "dbias"):
                got, want = actual.pop(name), expected.pop(name)
                if got is None:
                    assert want is None
                    continue
                got, want = (np.asarray(x, np.float32) for x in (got, want))
                # of float32 sums, rounded to bfloat16: at most to the next number
                np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=1e-5)
        exactly(actual, expected)

    with mock.patch.object(test_base.chex, "assert_trees_all_equal", equal):
        yield


@contextlib.contextmanager
def limits_of_the_largest() -> Iterator[None]:
    """Takes absolute limits as parts of the largest expected number, if above 1."""

    def close(actual: Any, expected: Any, *, atol: float, rtol: float) -> None:
        def check(got: jax.Array, want: jax.Array) -> None:
            assert got.shape == want.shape
            got, want = (x.astype(jnp.float32) for x in (got, want))
            size = max(1.0, float(jnp.abs(want).max(initial=0)))
            over = jnp.abs(got - want) - rtol * jnp.abs(want)
            worst = float(over.max(initial=0))
            assert worst <= atol * size, f"{worst} > {atol} x {size}"  # NaN is not

        jax.tree.map(check, actual, expected)

    with mock.patch.object(test_base.test_utils, "assert_trees_all_close", close):
        yield


@contextlib.contextmanager
def backends_used() -> Iterator[set[str]]:
    """Collects the names of the backends that compute forward passes."""
    names: set[str] = set()
    choose = Candidates.forward

    def forward(self: Candidates, problem: Any) -> Any:
        backend = choose(self, problem)
        names.add(backend.name)
        return backend

    with mock.patch.object(Candidates, "forward", forward):
        yield names


@pytest.mark.skipif(not has_gpu(), reason="on a CPU it is the class of 'online'")
class TestGpu(Suite, test_base.AttentionTestBase):
    """As users have it: what the kernels for Hopper GPUs refuse, "online" does."""

    implementation = ("mosaic-gpu", "online")

    def _run_test_with_inputs(self, q: Any, *args: Any, **options: Any) -> None:
        half = q.dtype in HALF
        with contextlib.ExitStack() as stack:
            if half:
                stack.enter_context(sums_in_any_order())
            names = stack.enter_context(backends_used())
            super()._run_test_with_inputs(q, *args, **options)
        assert names == {"mosaic-gpu" if half else "online"}


def to_bfloat16(x: jax.Array) -> jax.Array:
    """Rounds, the largest float32 to the largest bfloat16."""
    largest = float(jnp.finfo(jnp.bfloat16).max)
    return jnp.clip(x, -largest, largest).astype(jnp.bfloat16)


class TestMosaicGpu(Suite, test_base.AttentionTestBase):
    """The kernels for Hopper GPUs, which take no float32: such operands are rounded.

    Those of the reference are, too. The limits are those of tokamax's own class for
    its kernels for these GPUs, of results up to 1; of larger ones they are parts of the
    largest, because results and gradients are bfloat16 here. Interpreted on a CPU.
    """

    implementation = "mosaic-gpu"

    def adapted(self) -> Any:
        attention_fn = super().adapted()

        def rounding(q: Any, k: Any, v: Any, **options: Any) -> Any:
            q, k, v = (quantization.as_array(x) for x in (q, k, v))
            if q.dtype in HALF:
                return attention_fn(q, k, v, **options)
            q, k, v = (to_bfloat16(x) for x in (q, k, v))
            found = attention_fn(q, k, v, **options)
            return jax.tree.map(lambda x: x.astype(jnp.float32), found)

        return rounding

    def setUp(self) -> None:
        super().setUp()
        if has_gpu():
            return
        wanted = self._testMethodName.startswith(INTERPRETED)
        if not wanted and not os.environ.get("HLO_TOOLS_TOKAMAX_INTERPRET"):
            self.skipTest("takes minutes to interpret; HLO_TOOLS_TOKAMAX_INTERPRET=1")
        self.enterContext(hopper.interpret_mode(detect_races=False))

    def _run_test_with_inputs(
        self, q: Any, k: Any, v: Any, *, bias: Any = None, **options: Any
    ) -> None:
        if q.dtype not in HALF:
            q, k, v = (
                to_bfloat16(x).astype(x.dtype) if isinstance(x, jax.Array) else x
                for x in (q, k, v)
            )
        options["atol"] = max(options.get("atol", 0.0), 0.0045)
        options["atol_grads"] = None if bias is None else 0.02
        if not options.get("impl_kwargs", {}).get("normalize_output", True):
            # the gradients of the sum of exponentials have no limit there either
            options["test_vjp"] = False
        if max(q.shape[-1], v.shape[-1]) > FLAT_DEPTH:
            options["test_vjp"] = False
        with sums_in_any_order(), limits_of_the_largest():
            super()._run_test_with_inputs(q, k, v, bias=bias, **options)

    def test_normalize_output(self) -> None:
        with test_base.override_test_args(atol=0.02):
            super().test_normalize_output()

    def _test_small_sequences(self, *sizes: int) -> None:
        # Keys and values of one sign: dq is the difference of two large sums.
        with test_base.override_test_args(atol_grads=0.02):
            super()._test_small_sequences(*sizes)
