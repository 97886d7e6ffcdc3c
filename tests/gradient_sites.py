"""Sites with their gradients, for the tests of each `GradImplementation`.

The rule is that of the forward pass: the error against float64 is at most twice that
of the same computation done plainly in the site's own dtypes, plus a small term.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from attention_sites import (
    ATOL,
    SITES,
    Site,
    biased,
    error_of,
    last,
    make_spec,
    mask_side,
    plain_attention,
    site_of,
)

from hlo_tools.composites import AttentionSpec, SideSpec
from hlo_tools.gradients import (
    GradImplementation,
    GradSpec,
    Wanted,
    attention_grad_ref,
)
from hlo_tools.targets import Target

QKV: tuple[Wanted, ...] = ("q", "k", "v")

half_bias = functools.partial(biased, dtype="bfloat16", bias_dtype="bfloat16")

# name -> keywords of make_spec: sites whose first side, a bias, has a gradient too
BIAS_SITES: dict[str, dict] = {
    "dbias of batch and heads": half_bias(2, 2, 2, 40, 40),
    "dbias of heads": half_bias(1, 2, 2, 40, 40),
    "dbias of batch": half_bias(2, 1, 1, 40, 40),
    "dbias of neither": half_bias(1, 1, 1, 40, 40),
    "dbias, causal, more keys": half_bias(1, 2, 2, 24, 60, t=24, s=60, causal=True),
    "dbias, window": half_bias(1, 2, 2, 40, 40, window=(9, 2)),
    "dbias, empty rows": half_bias(
        1, 2, 2, 40, 40, causal=True, offset=-7, rows_never_empty=False
    ),
    "dbias, mask": {
        **half_bias(1, 2, 2, 40, 40),
        "has_mask": True, "mask_fn": last, "rows_never_empty": False,
        "sides": (SideSpec((1, 2, 2, 40, 40), "bfloat16"), *mask_side(2, 1, 1, 1, 40)),
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class GradSite:
    """A site, what is wanted of its gradients, and what is expected.

    Attributes:
      expected: in float64.
      limits: the largest error allowed, of each.
    """

    site: Site
    grad: GradSpec
    dout: np.ndarray
    expected: list[np.ndarray]
    limits: list[float]

    def check(self, implementation: GradImplementation, target: Target) -> None:
        """Runs both halves, each in a program of its own, and compares."""
        spec, inputs = self.site.spec, self.site.inputs
        assert implementation.supports(spec, self.grad, target) is None
        forward, backward = implementation.build(spec, self.grad, target)
        out, *residuals = jax.jit(forward)(*inputs)
        assert out.dtype == spec.out_dtype
        assert error_of(out, self.site.expected) <= self.site.limit
        for residual in residuals:
            assert residual.shape == (spec.batch, spec.heads, spec.q_len)
        got = jax.jit(backward)(*inputs, out, *residuals, self.dout)
        assert [str(x.dtype) for x in got] == list(self.grad.dtypes)
        rows = zip(self.grad.wanted, got, self.expected, self.limits, strict=True)
        for name, value, expected, limit in rows:
            assert value.shape == expected.shape
            error = error_of(value, expected)
            assert error <= limit, f"gradient of {name}: {error} > {limit}"


@functools.cache
def make_grad_site(
    name: str, dtype: str = "float32", wanted: tuple[Wanted, ...] = QKV
) -> GradSite:
    """Makes a row of SITES or BIAS_SITES, with random cotangents."""
    spec = make_spec(**{"dtype": dtype, **{**SITES, **BIAS_SITES}[name]})
    return grad_site_of(name, spec, wanted)


def grad_site_of(
    name: str, spec: AttentionSpec, wanted: tuple[Wanted, ...]
) -> GradSite:
    """Makes the site of a spec; its name is the seed of inputs and cotangents."""
    site = site_of(name, spec)
    rng = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    shape = (spec.batch, spec.q_len, spec.heads, spec.value_dim)
    dout = rng.standard_normal(shape).astype(jnp.dtype(spec.out_dtype))
    names = [*QKV, *range(len(spec.sides))]
    places = [names.index(name) for name in wanted]
    dtypes = tuple(str(site.inputs[place].dtype) for place in places)
    grad = GradSpec(wanted, dtypes, spec.out_dtype)
    expected = _expected(spec, grad, site.inputs, dout)
    plain = _plain_gradients(spec, places, site.inputs, dout)
    limits = [
        2 * error_of(x, e) + ATOL[dtype] * max(1.0, np.nanmax(np.abs(e), initial=0))
        for x, e, dtype in zip(plain, expected, dtypes, strict=True)
    ]
    return GradSite(site, grad, dout, expected, limits)


def _expected(spec: AttentionSpec, grad: GradSpec, inputs, dout) -> list[np.ndarray]:
    with jax.enable_x64(True):
        wide = [
            x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in (*inputs, dout)
        ]
        wide_spec = dataclasses.replace(spec, score_dtype="float64")
        run = functools.partial(attention_grad_ref, wide_spec, grad)
        return [np.asarray(x) for x in jax.jit(run)(*wide)]


def _plain_gradients(spec: AttentionSpec, places, inputs, dout) -> tuple:
    """What a program's own backward pass gives, in the site's own dtypes."""

    def run(*chosen):
        arrays = list(inputs)
        for place, array in zip(places, chosen, strict=True):
            arrays[place] = array
        return plain_attention(spec, *arrays)

    def gradients(dout, *chosen):
        return jax.vjp(run, *chosen)[1](dout)

    with np.errstate(invalid="ignore"):
        return jax.jit(gradients)(dout, *(inputs[place] for place in places))
