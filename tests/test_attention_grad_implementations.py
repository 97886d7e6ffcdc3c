"""Every attention with its backward pass against the reference, over the same sites."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_grad_sites import (
    grad_site_of,
    make_grad_site,
    online_as_bound,
    online_in_tiles,
)
from attention_sites import (
    SITES,
    error_of,
    make_site,
    make_spec,
    site_of,
    site_with,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hlo_tools.composites import AttentionSpec, SideSpec, modified_scores
from hlo_tools.gradients import Wanted


@dataclass(frozen=True)
class Row:
    """One implementation: which sites it is checked on, in which dtypes."""

    build: Callable
    sites: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32",)


BOUND_SITES = ("full", "one head, one batch", "decode, grouped", "causal",
               "mild fill", "score function only")  # fmt: skip
ONE_SWEEP_SITES = ("full", "odd lengths", "causal window, offset", "softcap",
                   "no visible key for some", "no visible key for some, -inf",
                   "bias, mask, causal", "score function only")  # fmt: skip
in_one_sweep = functools.partial(online_in_tiles, widen=False, sweep=False)
DTYPE_SITES = ("causal, offset", "bias, mask, causal")
NARROW = ("float64", "bfloat16", "float16")
IMPLEMENTATIONS: dict[str, Row] = {
    "online": Row(online_as_bound, BOUND_SITES),
    "online, in tiles": Row(online_in_tiles, tuple(SITES)),
    "online, other dtypes": Row(online_as_bound, DTYPE_SITES, NARROW),
    "online, in tiles, other dtypes": Row(online_in_tiles, DTYPE_SITES, NARROW),
    "online, narrow products": Row(
        functools.partial(online_in_tiles, widen=False), DTYPE_SITES, NARROW
    ),
    "online, one sweep": Row(in_one_sweep, ONE_SWEEP_SITES),
    "online, one sweep, other dtypes": Row(in_one_sweep, DTYPE_SITES, NARROW),
}


def all_but_first_slow(names: Iterable[str], *fast: str) -> list:
    """Marks all names slow but the first and those given."""
    first, *others = names
    marked = [
        name if name in fast else pytest.param(name, marks=pytest.mark.slow)
        for name in others
    ]
    return [first, *marked]


# In tiles, each of these adds something; the other sites are variations.
FAST_SITES = (
    "odd lengths",
    "causal window, offset",
    "softcap, causal",
    "bias, mask, causal",
    "score function only",
)


def gradient_cases() -> list:
    """Returns all cases; the slow ones take two seconds each, by the dozen."""
    cases = []
    for implementation, row in IMPLEMENTATIONS.items():
        for name, dtype in itertools.product(row.sites, row.dtypes):
            fast = dtype == "float32" and name in FAST_SITES + BOUND_SITES
            fast = fast and (row.build == online_in_tiles) == (name in FAST_SITES)
            fast = fast or (name, dtype) == (DTYPE_SITES[-1], "bfloat16")
            marks = [] if fast else [pytest.mark.slow]
            cases.append(pytest.param(implementation, name, dtype, marks=marks))
    return cases


@pytest.mark.parametrize(("implementation", "name", "dtype"), gradient_cases())
def test_gradients(implementation: str, name: str, dtype: str) -> None:
    site = make_grad_site(name, dtype)
    site.check(IMPLEMENTATIONS[implementation].build(site.site.spec, site.grad))


# site, what is wanted of it
SUBSETS: dict[str, tuple[str, tuple[Wanted, ...]]] = {
    "q": ("causal", ("q",)),
    "k and v": ("odd lengths", ("k", "v")),
    "v": ("prime sizes", ("v",)),
    "bias": ("bias, shared", (0,)),
    "any order": ("bias, mask, causal", (0, "v", "q")),
    "of a score function": ("score function only", (0,)),
    "slopes and k": ("alibi", ("k", 0)),
}


@pytest.mark.parametrize("subset", all_but_first_slow(SUBSETS, "any order"))
def test_subsets(subset: str) -> None:
    name, wanted = SUBSETS[subset]
    site = make_grad_site(name, wanted=wanted)
    site.check(online_in_tiles(site.site.spec, site.grad))


def test_with_64_bit_types_on() -> None:
    """Loop counters are wider then; a float32 site is not."""
    site = make_grad_site("bias, mask, causal")
    halves = online_in_tiles(site.site.spec, site.grad)
    with jax.enable_x64(True):
        out, *residuals = jax.jit(halves[0])(*site.site.inputs)
        grads = jax.jit(halves[1])(*site.site.inputs, out, *residuals, site.dout)
    assert [str(x.dtype) for x in residuals] == ["float32"] * 2
    assert tuple(str(x.dtype) for x in grads) == site.grad.dtypes
    for got, expected, limit in zip(grads, site.expected, site.limits, strict=True):
        assert error_of(got, expected) <= limit


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(check_vma: bool) -> None:
    """Batch and heads split: the gradient of a shared bias is a sum over devices."""
    site = make_grad_site("bias, shared")
    spec = dataclasses.replace(site.site.spec, batch=1, kv_heads=1)
    spec = dataclasses.replace(spec, sides=(SideSpec((1, 1, 2, 40, 40), "float32"),))
    forward, backward = online_in_tiles(spec, site.grad)

    def program(q, k, v, bias, dout):
        out, *residuals = forward(q, k, v, bias)
        *grads, of_bias = backward(q, k, v, bias, out, *residuals, dout)
        return *grads, jax.lax.psum(of_bias, "data")

    array, side = P("data", None, "heads"), P(None, "heads")
    mapped = jax.shard_map(
        program,
        mesh=jax.make_mesh((2, 2), ("data", "heads"), (AxisType.Auto,) * 2),
        in_specs=(array, array, array, side, array),
        out_specs=(array, array, array, side),
        check_vma=check_vma,
    )
    grads = jax.jit(mapped)(*site.site.inputs, site.dout)
    for got, expected, limit in zip(grads, site.expected, site.limits, strict=True):
        assert error_of(got, expected) <= limit


def test_empty_rows_reach_hidden_keys() -> None:
    """Also those of key blocks that no query of the block sees."""
    site = make_grad_site("no visible key for any", wanted=("q", "k", "v"))
    spec = site.site.spec
    dq, dk, dv = site.check(online_in_tiles(spec, site.grad))
    assert not np.any(dq)
    assert not np.any(dk)
    grouped = site.dout.reshape(spec.batch, spec.q_len, spec.kv_heads, spec.group, -1)
    share = grouped.sum((1, 3))[:, None] / spec.k_len
    np.testing.assert_allclose(dv, np.broadcast_to(share, dv.shape), rtol=1e-5)


def test_empty_rows_of_infinite_fill() -> None:
    """NaN for all values, but no score of such a row is a product of q and k."""
    site = make_grad_site("no visible key for some, -inf")
    dq, dk, dv = site.check(online_in_tiles(site.site.spec, site.grad))
    assert np.isnan(dv).all()
    assert np.isfinite(dq).all()
    assert np.isfinite(dk).all()


# Which parts are float32 in a site that is bfloat16 otherwise.
MIXED = {
    "softmax": ("softmax",),
    "scores and softmax": ("score", "softmax"),
    "all but operands": ("score", "softmax", "probs"),
    "all but operands, and the result": ("score", "softmax", "probs", "out"),
}


@pytest.mark.parametrize("wide", all_but_first_slow(MIXED))
@pytest.mark.parametrize("accelerator", [True, False])
def test_mixed_dtypes(wide: str, accelerator: bool) -> None:
    """The gradient is as exact as the site's own also where the result is rounded."""
    full = make_site("causal", "bfloat16")
    dtypes = {f"{part}_dtype": "float32" for part in MIXED[wide]}
    spec = dataclasses.replace(full.spec, **dtypes)
    site = grad_site_of(dataclasses.replace(full, spec=spec), wide)
    site.check((in_one_sweep if accelerator else online_in_tiles)(spec, site.grad))


# name -> fields of make_spec
SATURATED = {
    "one tile": {"t": 128, "s": 128},
    "one tile, causal": {"t": 128, "s": 128, "causal": True},
    "whole rows": {"t": 1024, "s": 1024},
    "many tiles": {"t": 1024, "s": 1024, "causal": True},
    "softcap": {"t": 600, "s": 600, "causal": True, "softcap": 300.0},
}


def gradients_about_top(spec: AttentionSpec, q, k, v, dout) -> tuple[jax.Array, ...]:
    """The gradients of q, k, v [B,N,H,*] from dP less that of a row's top key.

    Of that key dX is -P delta then. Where 1 - P is below the dtype's epsilon, JAX's
    own gradient, P dP - P sum(P dP), is 0 there, in float64 as well: the sum is dP.
    """
    einsum = functools.partial(jnp.einsum, precision="highest")
    q_pos, k_pos = (jnp.arange(n, dtype=jnp.int32) for n in (q.shape[1], k.shape[1]))

    def modified(q, k):
        scores = einsum("bthd,bshd->bhts", q, k)[:, :, None]
        return modified_scores(spec, scores, (), q_pos, k_pos)[:, :, 0]

    x, pull = jax.vjp(modified, q, k)
    probs, dprobs = jax.nn.softmax(x), einsum("bthd,bshd->bhts", dout, v)
    dprobs -= jnp.take_along_axis(dprobs, x.argmax(-1, keepdims=True), -1)
    dx = probs * (dprobs - (probs * dprobs).sum(-1, keepdims=True))
    return *pull(dx), einsum("bhts,bthd->bshd", probs, dout)


@pytest.mark.parametrize("name", all_but_first_slow(SATURATED, "many tiles"))
def test_saturated_softmax(name: str) -> None:
    """Scores near 100: most rows have all of their probability at one key.

    The true gradients of q and k are next to nothing then, and what a row's dP - delta
    leaves by rounding would be far above them: no absolute term hides it here. It is
    the same at any length, 4096 included, on a CPU; elsewhere rows longer than a tile
    keep an error of the size of float32's epsilon times dP.
    """
    size = {"b": 1, "k": 2, "g": 1, "d": 64, "scale": 1.5}
    spec = make_spec(**{**size, **SATURATED[name]})
    _, k, v = site_of(name, spec).inputs
    k *= 8 / np.linalg.norm(k, axis=-1, keepdims=True)
    # Each query is one of the keys: its own has a score of 96, others up to 60, and
    # what these are rounded by, 4e-6, is the relative error of their probabilities.
    site = grad_site_of(site_with(spec, [k, k, v]), name)
    run = jax.jit(functools.partial(gradients_about_top, spec))
    same_dtype = run(k, k, v, site.dout)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in (k, k, v, site.dout)]
        expected = [np.asarray(x) for x in run(*wide)]
    limits = [
        2 * error_of(x, e) + 1e-5 * np.abs(e).max()
        for x, e in zip(same_dtype, expected, strict=True)
    ]
    dq, dk, _ = (np.abs(x).max() for x in expected)
    assert 0 < max(dq, dk) < 1e-9
    assert limits[0] < 1e-4 * dq
    assert limits[1] < 1e-4 * dk
    site = dataclasses.replace(site, expected=expected, limits=limits)
    site.check(online_as_bound(spec, site.grad))
