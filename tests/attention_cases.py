"""Calls of `attention` to check backends on: arguments, references and limits.

The rule is that of attention_sites.py: the error against float64 is at most twice
that of the same computation done plainly in the call's own dtype, plus a small term.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_sites import ATOL

from pallas_kernels import attention
from pallas_kernels.attention.arguments import make_problem
from pallas_kernels.attention.problem import AttentionProblem, Operands
from pallas_kernels.attention.reference import attention_ref, visible_keys

# What `make_problem` wants to be told.
DEFAULTS: dict[str, Any] = {
    "bias": None, "mask": None, "scale": None, "causal": False, "offset": 0,
    "window": None, "softcap": None, "q_segment_ids": None, "kv_segment_ids": None,
    "q_lengths": None, "kv_lengths": None, "sinks": None,
}  # fmt: skip
GRADIENTS = ("q", "k", "v", "bias", "sinks")


def sized(b=2, t=24, s=40, h=4, k=2, d=16, dv=None, **arguments) -> dict[str, Any]:
    """A row: the sizes, and arguments; a shape stands for a random array."""
    sizes = {"b": b, "t": t, "s": s, "h": h, "k": k, "d": d, "dv": dv or d}
    return {"sizes": sizes, **arguments}


def segment_ids(*lengths: int) -> np.ndarray:
    return np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)


PACKED: dict[str, Any] = {
    "q_segment_ids": np.stack([segment_ids(10, 14), segment_ids(3, 5, 16)]),
    "kv_segment_ids": np.stack([segment_ids(22, 18), segment_ids(2, 20, 18)]),
}
EVERYTHING: dict[str, Any] = {
    **PACKED, "causal": True, "offset": 9, "window": (17, None), "softcap": 1.5,
    "bias": (1, 4, 24, 40), "mask": (2, 1, 24, 40), "sinks": (4,),
    "q_lengths": np.array([24, 19]), "kv_lengths": np.array([33, 40]), "scale": 0.3,
}  # fmt: skip
# More than one tile of the kernels, in both directions.
LONG: dict[str, Any] = {
    "t": 200, "s": 300, "h": 2, "k": 1, "causal": True, "offset": 100,
    "q_segment_ids": np.stack([segment_ids(150, 50), segment_ids(60, 140)]),
    "kv_segment_ids": np.stack([segment_ids(220, 80), segment_ids(100, 200)]),
    "q_lengths": np.array([200, 120]), "kv_lengths": np.array([270, 300]),
}  # fmt: skip

# name -> sizes and arguments
CASES: dict[str, dict[str, Any]] = {
    "full": sized(),
    "one head": sized(b=1, h=1, k=1),
    "multi-query": sized(k=1),
    "value dim": sized(dv=24),
    "prime sizes": sized(t=37, s=53, d=7, h=3, k=3),
    "one key": sized(s=1),
    "one query": sized(t=1, s=77),
    "negative scale": sized(scale=-0.4),
    "causal": sized(t=40, causal=True),
    "causal, more queries": sized(t=61, s=24, causal=True),
    "causal, offset": sized(causal=True, offset=16),
    "causal, empty rows": sized(t=40, causal=True, offset=-7),
    "window": sized(t=40, window=(5, 3)),
    "window, one number": sized(t=40, window=4, offset=2),
    "window to the left": sized(t=40, window=(9, None)),
    "causal window": sized(t=50, s=50, causal=True, window=(9, 0)),
    "no key for any": sized(window=(3, 3), offset=1000),
    "softcap": sized(softcap=2.0, scale=1.0),
    "bias": sized(bias=(2, 4, 24, 40)),
    "bias of heads": sized(bias=(4, 24, 40), causal=True),
    "bias of batch": sized(bias=(2, 1, 24, 40)),
    "bias of keys": sized(bias=(2, 1, 1, 40)),
    "bias of queries": sized(bias=(1, 4, 24, 1)),
    "bias, one number": sized(bias=(1,)),
    "bias and softcap": sized(bias=(1, 4, 24, 40), softcap=2.0),
    "mask": sized(mask=(2, 1, 24, 40)),
    "mask of heads": sized(mask=(1, 4, 24, 40)),
    "mask of keys": sized(mask=(2, 1, 1, 40), causal=True, offset=16),
    "mask of queries": sized(mask=(2, 1, 24, 1)),
    "segments": sized(**PACKED),
    "segments, causal": sized(**PACKED, causal=True, offset=16),
    "lengths": sized(q_lengths=np.array([24, 5]), kv_lengths=np.array([33, 0])),
    "sinks": sized(sinks=(4,)),
    "sinks, empty rows": sized(sinks=(4,), mask=(2, 1, 24, 40)),
    "everything": sized(**EVERYTHING),
    "several tiles": sized(
        **LONG, bias=(1, 2, 200, 300), mask=(2, 1, 1, 300), window=(150, None),
    ),
    "several tiles, bias of keys": sized(**LONG, bias=(2, 1, 1, 300), softcap=2.0),
    "several tiles, bias of queries": sized(**LONG, bias=(1, 2, 200, 1), sinks=(2,)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A call, cotangents, and what is expected of its results and gradients.

    Attributes:
      arguments: of `attention`.
      dout, dlse: cotangents of the results.
      with_lse: lse is returned; if not, dlse is 0.
      expected: "out", "lse" and GRADIENTS -> in float64.
      limits: the same -> the largest error allowed.
    """

    arguments: dict[str, Any]
    dout: np.ndarray
    dlse: np.ndarray
    with_lse: bool
    expected: dict[str, np.ndarray]
    limits: dict[str, float]

    def check(self, **options: Any) -> None:
        """Runs `attention` and its gradients, and compares."""

        def run(**arguments: Any) -> tuple[Any, Any]:
            found = attention(return_lse=self.with_lse, **arguments, **options)
            lse = self.expected["lse"].astype(np.float32)
            return found if self.with_lse else (found, lse)

        got = run_call(run, self.arguments, self.dout, self.dlse)
        assert set(got) == set(self.expected)
        for name, value in got.items():
            expected = self.expected[name]
            assert value.shape == expected.shape, name
            if name != "lse":
                source = {"out": "q"}.get(name, name)
                assert value.dtype == self.arguments[source].dtype, name
            error = error_of(value, expected)
            assert error <= self.limits[name], f"{name}: {error} > {self.limits[name]}"


def error_of(got: Any, expected: np.ndarray) -> float:
    """The largest error; infinities have to agree, and nothing may be NaN."""
    got = np.asarray(got).astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    return float(np.abs(got[finite] - expected[finite]).max(initial=0))


def run_call(
    function: Callable, arguments: dict[str, Any], dout: Any, dlse: Any
) -> dict[str, Any]:
    """Returns the results of `function` and its gradients, by name."""
    names = [name for name in GRADIENTS if name in arguments]
    fixed = {name: x for name, x in arguments.items() if name not in names}

    def run(dout, dlse, *values):
        def results(*values):
            return function(**dict(zip(names, values, strict=True)), **fixed)

        (out, lse), vjp = jax.vjp(results, *values)
        grads = vjp((dout.astype(out.dtype), dlse.astype(lse.dtype)))
        return out, lse, *grads

    found = jax.jit(run)(dout, dlse, *(arguments[name] for name in names))
    return dict(zip(["out", "lse", *names], found, strict=True))


@functools.cache
def make_case(name: str, dtype: str = "float32", with_lse: bool = True) -> Case:
    """Makes a row of CASES, with random arrays; the name is their seed."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    row = dict(CASES[name])
    n = row.pop("sizes")
    shapes = {
        "q": (n["b"], n["t"], n["h"], n["d"]),
        "k": (n["b"], n["s"], n["k"], n["d"]),
        "v": (n["b"], n["s"], n["k"], n["dv"]),
    } | {name: row.pop(name) for name in ("bias", "sinks") if name in row}
    arguments = {
        key: rng.standard_normal(shape).astype(
            np.float32 if key == "sinks" and dtype != "float64" else jnp.dtype(dtype)
        )
        for key, shape in shapes.items()
    }
    if "mask" in row:
        mask = rng.random(row.pop("mask")) < 0.6
        mask[..., :3, :] &= mask.shape[-2] == 1  # some queries see no key
        arguments["mask"] = mask
    return case_of({**arguments, **row}, rng, with_lse)


def case_of(
    arguments: dict[str, Any], rng: np.random.Generator, with_lse: bool
) -> Case:
    """Makes a case of arguments."""
    q, v = arguments["q"], arguments["v"]
    dout = rng.standard_normal((*q.shape[:3], v.shape[3])).astype(q.dtype)
    dlse = rng.standard_normal((q.shape[0], q.shape[2], q.shape[1])) * with_lse
    wide = {
        key: x.astype(np.float64)
        if isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
        else x
        for key, x in arguments.items()
    }
    with jax.enable_x64(True):
        expected = run_call(functools.partial(_called, attention_ref), wide, dout, dlse)
        expected = {name: np.asarray(x) for name, x in expected.items()}
    assert not any(np.isnan(x).any() for x in expected.values())
    with jax.enable_x64(q.dtype == np.float64):
        plain = run_call(
            functools.partial(_called, plain_attention), arguments, dout, dlse
        )
    limits = {
        name: 2 * error_of(x, expected[name])
        + ATOL[q.dtype.name] * max(1.0, float(_size(expected[name])))
        for name, x in plain.items()
    }
    return Case(arguments, dout, dlse, with_lse, expected, limits)


def _size(array: np.ndarray) -> float:
    return np.abs(array[np.isfinite(array)]).max(initial=0)


def _called(function: Callable, **arguments: Any) -> tuple[jax.Array, jax.Array]:
    return function(*make_problem(**{**DEFAULTS, **arguments}))


def plain_attention(
    problem: AttentionProblem, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    """What a program would write: operands of products in the call's own dtype."""
    q, k, v = operands[:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    k, v = (jnp.repeat(x, problem.group, axis=2) for x in (k, v))
    x = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=wide)
    x = x * problem.scale
    if problem.softcap is not None:
        x = problem.softcap * jnp.tanh(x / problem.softcap)
    if operands.bias is not None:
        x = x + operands.bias.astype(wide)
    keep = visible_keys(problem, operands)
    keep = jnp.broadcast_to(True if keep is None else keep, x.shape)
    x = jnp.where(keep, x, -1e30)
    shape = (*x.shape[:3], 1)
    sinks = jnp.full(shape, -1e30, wide)
    if operands.sinks is not None:
        sinks = jnp.broadcast_to(operands.sinks[None, :, None, None], shape)
    seen = keep.any(-1)
    lse = jax.nn.logsumexp(jnp.concatenate([x, sinks.astype(wide)], -1), -1)
    if operands.sinks is None:
        lse = jnp.where(seen, lse, -jnp.inf)
    row = jnp.where(seen, lse, 0)
    probs = jnp.where(keep, jnp.exp(x - row[..., None]), 0)
    return jnp.einsum("bhts,bshd->bthd", probs.astype(q.dtype), v), lse
