"""Attention sites to check implementations on: specs, inputs and references.

The rule: the error against float64 is at most twice that of the same computation
done plainly in the site's own dtypes, plus a small absolute term.
"""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from hlo_tools.composites import (
    AttentionSpec,
    SideSpec,
    attention_ref,
    modified_scores,
)
from hlo_tools.targets import Target

CPU = Target.parse("cpu")
ATOL = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4}


def make_spec(
    b=2, t=40, s=40, k=2, g=2, d=16, dv=None, dtype="float32", **fields
) -> AttentionSpec:
    """A site whose parts all have one dtype, except what `fields` says."""
    names = ("q", "k", "v", "score", "softmax", "probs", "out")
    dtypes = {f"{name}_dtype": dtype for name in names}
    sizes = {
        "batch": b, "q_len": t, "k_len": s, "kv_heads": k, "group": g,
        "head_dim": d, "value_dim": dv or d,
    }  # fmt: skip
    defaults = {"scale": d**-0.5, **dtypes, **sizes}
    if fields.get("causal") or fields.get("window") or fields.get("has_mask"):
        defaults["mask_fill"] = -1e30 if dtype != "float16" else -6e4
    return AttentionSpec(**{**defaults, **fields})


def first(sides, q_pos, k_pos):
    return sides[0]


def last(sides, q_pos, k_pos):
    return sides[-1]


def alibi(sides, q_pos, k_pos):
    slopes = sides[0]  # [1,K,G,1,1]
    return slopes * (k_pos[None, :] - q_pos[:, None]).astype(slopes.dtype)


def until_length(sides, q_pos, k_pos):
    return k_pos < sides[0]  # [B,1,1,1,1]


def relative_gate(scores, sides, q_pos, k_pos):
    """No named form: tanh of the score plus a distance term, and a parity mask."""
    distance = (k_pos[None, :] - q_pos[:, None]).astype(scores.dtype)
    x = 2 * jnp.tanh(0.3 * scores) + sides[0].astype(scores.dtype)
    x = x - 0.01 * jnp.abs(distance)
    keep = (q_pos[:, None] + k_pos[None, :]) % 3 != 0
    return jnp.where(keep, x, -jnp.inf)


def mask_side(*shape, dtype="bool"):
    return (SideSpec(shape, dtype),)


def masked(*shape, fn=first, **fields):
    return {"has_mask": True, "mask_fn": fn, "sides": mask_side(*shape), **fields}


def biased(*shape, dtype="float32", fn=first, **fields):
    sides = (SideSpec(shape, dtype),)
    return {"has_bias": True, "bias_fn": fn, "sides": sides, **fields}


# name -> keywords of make_spec
SITES: dict[str, dict] = {
    "full": {},
    "one head, one batch": {"b": 1, "k": 1, "g": 1},
    "multi-query": {"k": 1, "g": 4},
    "value dim": {"d": 16, "dv": 24},
    "prime sizes": {"t": 37, "s": 53, "d": 7, "k": 3, "g": 1},
    "odd lengths": {"t": 37, "s": 53, "causal": True},
    "one key": {"s": 1},
    "decode": {"t": 1, "s": 77},
    "decode, grouped": {"t": 1, "s": 77, "k": 2, "g": 4},
    "causal": {"causal": True},
    "causal, more keys": {"causal": True, "t": 24, "s": 61},
    "causal, more queries": {"causal": True, "t": 61, "s": 24},
    "causal, offset": {"causal": True, "t": 24, "s": 61, "offset": 37},
    "causal, -inf": {"causal": True, "mask_fill": -np.inf},
    "window": {"window": (5, 3)},
    "window to the left": {"window": (9, None)},
    "causal window": {"causal": True, "window": (9, 0), "t": 50, "s": 50},
    "causal window, offset": {
        "causal": True, "window": (6, None), "t": 10, "s": 50, "offset": 40,
    },
    "no visible key for some": {
        "causal": True, "offset": -7, "rows_never_empty": False,
    },
    "no visible key for some, -inf": {
        "causal": True, "offset": -7, "rows_never_empty": False,
        "mask_fill": -np.inf,
    },
    "no visible key for any": {
        "window": (3, 3), "offset": 1000, "rows_never_empty": False,
    },
    "softcap": {"softcap": 2.0, "scale": 1.0},
    "softcap, causal": {"softcap": 2.0, "causal": True},
    "mask": masked(2, 1, 1, 40, 40, rows_never_empty=False),
    "mask, -inf": masked(2, 1, 1, 40, 40, mask_fill=-np.inf, rows_never_empty=False),
    "mask of keys": masked(2, 1, 1, 1, 40, rows_never_empty=False),
    "mask of keys, causal": masked(
        2, 1, 1, 1, 40, causal=True, rows_never_empty=False
    ),
    "mask per head": masked(1, 2, 2, 40, 40, rows_never_empty=False),
    "mild fill": masked(2, 1, 1, 40, 40, mask_fill=-3.0, causal=True),
    "lengths": {
        "has_mask": True, "mask_fn": until_length, "t": 1, "s": 64,
        "sides": mask_side(2, 1, 1, 1, 1, dtype="int32"),
    },
    "bias": biased(2, 2, 2, 40, 40),
    "bias, shared": biased(1, 2, 2, 40, 40),
    "bias of keys": biased(2, 1, 1, 1, 40, causal=True),
    "alibi": biased(1, 2, 2, 1, 1, fn=alibi, causal=True),
    "bias, mask, causal": {
        "has_bias": True, "has_mask": True, "bias_fn": first, "mask_fn": last,
        "causal": True, "rows_never_empty": False,
        "sides": (SideSpec((1, 2, 2, 40, 40), "float32"), *mask_side(2, 1, 1, 1, 40)),
    },
    "score function only": {
        "named": False, "score_mod": relative_gate, "t": 29, "s": 45,
        "sides": (SideSpec((1, 2, 1, 29, 45), "float32"),),
    },
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Site:
    """A spec, random inputs for it, what is expected of them, and the limit.

    Attributes:
      expected: in float64.
      limit: the largest error allowed.
    """

    spec: AttentionSpec
    inputs: list[np.ndarray]
    expected: np.ndarray
    limit: float

    def check(self, function: Callable) -> None:
        with jax.enable_x64(self.spec.compute_dtype == jnp.float64):
            got = jax.jit(function)(*self.inputs)
        assert got.dtype == self.spec.out_dtype
        assert got.shape == self.expected.shape
        assert error_of(got, self.expected) <= self.limit


@functools.cache
def make_site(name: str, dtype: str = "float32") -> Site:
    """Makes the site of a row of SITES, and works out its reference once."""
    return site_of(name, make_spec(**{"dtype": dtype, **SITES[name]}))


def site_of(name: str, spec: AttentionSpec) -> Site:
    """Makes the site of a spec; its name is the seed of the inputs."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    heads = (spec.heads, spec.kv_heads, spec.kv_heads)
    lengths = (spec.q_len, spec.k_len, spec.k_len)
    depths = (spec.head_dim, spec.head_dim, spec.value_dim)
    dtypes = (spec.q_dtype, spec.k_dtype, spec.v_dtype)
    inputs = [
        rng.standard_normal((spec.batch, n, h, d)).astype(jnp.dtype(dtype))
        for n, h, d, dtype in zip(lengths, heads, depths, dtypes, strict=True)
    ]
    return site_with(
        spec, [*inputs, *(random_side(rng, side, spec) for side in spec.sides)]
    )


def site_with(spec: AttentionSpec, inputs: list[np.ndarray]) -> Site:
    """Makes the site of a spec with given inputs."""
    with jax.enable_x64(True):
        wide = [
            x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in inputs
        ]
        expected = np.asarray(jax.jit(functools.partial(attention_ref, spec))(*wide))
    with jax.enable_x64(spec.compute_dtype == jnp.float64):
        plain = jax.jit(functools.partial(plain_attention, spec))(*inputs)
    limit = 2 * error_of(plain, expected) + ATOL[spec.out_dtype]
    return Site(spec, inputs, expected, limit)


def random_side(rng, side: SideSpec, spec: AttentionSpec) -> np.ndarray:
    if side.dtype == "bool":
        mask = rng.random(side.shape) < 0.6
        if spec.rows_never_empty:
            mask[..., 0] = True
        elif side.shape[3] > 1:
            mask[..., :3, :] = False
        else:
            mask[0] = False
        return mask
    if side.dtype == "int32":
        return rng.integers(1, spec.k_len + 1, side.shape).astype(np.int32)
    return rng.standard_normal(side.shape).astype(jnp.dtype(side.dtype))


def plain_attention(spec: AttentionSpec, q, k, v, *sides):
    """What a program would write, in the site's own dtypes."""
    q = q.reshape(*q.shape[:2], spec.kv_heads, spec.group, spec.head_dim)
    scores = jnp.einsum(
        "btkgd,bskd->bkgts", q, k, preferred_element_type=spec.score_dtype
    )
    q_pos, k_pos = (jnp.arange(n, dtype=jnp.int32) for n in (spec.q_len, spec.k_len))
    x = modified_scores(spec, scores, sides, q_pos, k_pos)
    probs = jax.nn.softmax(x.astype(spec.softmax_dtype), axis=-1)
    out = jnp.einsum("bkgts,bskd->btkgd", probs.astype(spec.probs_dtype), v)
    return out.reshape(*out.shape[:2], spec.heads, -1).astype(spec.out_dtype)


def error_of(got, expected: np.ndarray) -> float:
    """The largest error; NaN has to stand where NaN is expected, and only there."""
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    return float(np.nan_to_num(np.abs(got - expected)).max())
