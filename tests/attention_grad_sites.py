"""Sites of attention with their backward pass, for the tests of its implementations.

The rule is that of attention_sites.py, for the result and for each gradient; the
absolute term counts in units of the largest gradient, if that is above 1.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from attention_sites import (
    ATOL,
    CPU,
    Site,
    error_of,
    make_site,
    plain_attention,
)

from hlo_tools.composites import AttentionSpec
from hlo_tools.gradients import GradSpec, Wanted, attention_grad_ref
from pallas_kernels.attention import online, online_backward, online_tiling
from pallas_kernels.attention.online_forward import online_attention_stats

GRAD = online.IMPLEMENTATION.grad
assert GRAD is not None


@dataclass(frozen=True, eq=False)
class GradSite:
    """A site, what is wanted of it, and what is expected.

    Attributes:
      dout: the cotangent.
      expected: of each gradient, in float64.
      limits: the largest error allowed of each.
    """

    site: Site
    grad: GradSpec
    dout: np.ndarray
    expected: list[np.ndarray]
    limits: list[float]

    def check(self, halves: tuple[Callable, Callable]) -> list[np.ndarray]:
        """Runs both halves as a program does, and checks all results."""
        spec, inputs = self.site.spec, self.site.inputs
        rows = (spec.batch, spec.heads, spec.q_len)
        forward, backward = halves

        def program(dout, *inputs):
            out, *residuals = forward(*inputs)
            assert all(x.shape == rows for x in residuals)
            return out, *backward(*inputs, out, *residuals, dout)

        with jax.enable_x64(spec.compute_dtype == jnp.float64):
            out, *grads = jax.jit(program)(self.dout, *inputs)
        assert out.dtype == spec.out_dtype
        assert error_of(out, self.site.expected) <= self.site.limit
        assert tuple(str(x.dtype) for x in grads) == self.grad.dtypes
        for name, got, expected, limit in zip(
            self.grad.wanted, grads, self.expected, self.limits, strict=True
        ):
            assert got.shape == expected.shape
            error = error_of(got, expected)
            assert error <= limit, f"the gradient of {name}: {error} > {limit}"
        return grads


def all_wanted(spec: AttentionSpec) -> tuple[Wanted, ...]:
    """q, k, v and every side that has a gradient."""
    floats = [
        number
        for number, side in enumerate(spec.sides)
        if jnp.issubdtype(side.dtype, jnp.floating)
    ]
    return ("q", "k", "v", *floats)


@functools.cache
def make_grad_site(
    name: str, dtype: str = "float32", wanted: tuple[Wanted, ...] | None = None
) -> GradSite:
    """Makes the site of a row of SITES, with the gradients of all that has one."""
    return grad_site_of(make_site(name, dtype), name, wanted)


def grad_site_of(
    site: Site, seed: str, wanted: tuple[Wanted, ...] | None = None
) -> GradSite:
    """Makes a site with its gradients; the seed is that of the cotangent."""
    spec = site.spec
    wanted = wanted or all_wanted(spec)
    names: list[Wanted] = ["q", "k", "v", *range(len(spec.sides))]
    places = [names.index(name) for name in wanted]
    dtypes = tuple(str(site.inputs[place].dtype) for place in places)
    grad = GradSpec(wanted, dtypes, spec.out_dtype)
    rng = np.random.default_rng(zlib.crc32(seed.encode()) + 1)
    shape = (spec.batch, spec.q_len, spec.heads, spec.value_dim)
    dout = rng.standard_normal(shape).astype(jnp.dtype(spec.out_dtype))
    arrays = [*site.inputs, dout]
    with jax.enable_x64(True):
        wide = [
            x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in arrays
        ]
        wide_spec = dataclasses.replace(spec, q_dtype="float64")
        reference = functools.partial(attention_grad_ref, wide_spec, grad)
        expected = [np.asarray(x) for x in jax.jit(reference)(*wide)]

    def plain(*arrays):
        *inputs, dout = arrays

        def run(*chosen):
            mixed = list(inputs)
            for place, array in zip(places, chosen, strict=True):
                mixed[place] = array
            return plain_attention(spec, *mixed)

        return jax.vjp(run, *(inputs[place] for place in places))[1](dout)

    with jax.enable_x64(spec.compute_dtype == jnp.float64):
        plain_grads = jax.jit(plain)(*arrays)
    limits = [
        2 * error_of(got, want)
        + ATOL[spec.out_dtype] * max(1.0, float(np.nanmax(np.abs(want), initial=0.0)))
        for got, want in zip(plain_grads, expected, strict=True)
    ]
    return GradSite(site, grad, dout, expected, limits)


def online_as_bound(spec: AttentionSpec, grad: GradSpec):
    return GRAD.build(spec, grad, CPU)


def online_in_tiles(
    spec: AttentionSpec, grad: GradSpec, widen: bool = True, sweep: bool = True
) -> tuple[Callable, Callable]:
    """Several blocks along every dimension, the last ones partial."""
    queries, keys = min(16, spec.q_len), min(16, spec.k_len)
    blocks = online_tiling.Blocks(1, 1, queries, keys)
    backward = online_backward.online_attention_grads
    return (
        functools.partial(online_attention_stats, spec, blocks, widen),
        functools.partial(backward, spec, grad, blocks, widen, sweep),
    )
