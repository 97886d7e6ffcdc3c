"""Attention and its backward pass on a GPU: are the gradients right, and how fast.

Every row of `CHECKS` for cuDNN and for our own kernels, as the stage would bind
them: the largest error of each gradient against float32 at highest precision, beside
that of the same computation written plainly and compiled by XLA. `ok` is the rule of
the tests: at most twice the plain error and a small term, and NaN where NaN belongs.
Before that, times of forward and backward together, the best of three runs of many
calls, with XLA's own code and `jax.nn.dot_product_attention(implementation="cudnn")`.

    python benchmarks/attention_grad_gpu.py [--output FILE] [--limit SECONDS]
        [--parts checks,times] [--implementations cudnn,mosaic-gpu]

What raises is recorded and passed over, what is refused has the reason; what does not
fit into the limit is left out, and said so.
Writes benchmarks/results/attention_grad_gpu.json.
"""

import argparse
import functools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlo_tools.composites import (
    AttentionSpec,
    SideSpec,
    attention_ref,
    modified_scores,
)
from hlo_tools.gradients import GradSpec, Wanted, attention_grad_ref
from hlo_tools.targets import Target
from pallas_kernels.attention import cudnn_grad, gpu_binding

GRADIENTS = {"cudnn": cudnn_grad.GRAD, "mosaic-gpu": gpu_binding.GRAD}
RESULTS = Path(__file__).parent / "results" / "attention_grad_gpu.json"
ATOL = {"bfloat16": 4e-3, "float16": 5e-4}  # of the largest expected value


def side(*shape: int, dtype: str = "bfloat16") -> SideSpec:
    return SideSpec(shape, dtype)


def first(sides, q_pos, k_pos):
    return sides[0]


def last(sides, q_pos, k_pos):
    return sides[-1]


def masked(*shape: int, **fields) -> dict[str, Any]:
    sides = (side(*shape, dtype="bool"),)
    return {"has_mask": True, "mask_fn": last, "sides": sides, **fields}


def biased(*shape: int, dtype: str = "bfloat16", **fields) -> dict[str, Any]:
    sides = (side(*shape, dtype=dtype),)
    return {
        "has_bias": True, "bias_fn": first, "bias_dtype": dtype, "sides": sides,
        **fields,
    }  # fmt: skip


EMPTY = {"rows_never_empty": False}
# name -> keywords of make_spec; a row of "dbias" wants the first side's gradient
CHECKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal, float16": {"causal": True, "dtype": "float16"},
    "float32 scores": {"causal": True, "score_dtype": "float32"},
    "grouped": {"causal": True, "k": 2, "g": 4},
    "multi-query": {"k": 1, "g": 4},
    "head dim 64": {"causal": True, "d": 64},
    "head dim 256": {"causal": True, "d": 256},
    "head dim 72": {"d": 72},
    "value dim 64": {"d": 128, "dv": 64},
    "value dim 128": {"d": 192, "dv": 128, "causal": True},
    "odd lengths": {"t": 201, "s": 333},
    "odd lengths, causal": {"t": 201, "s": 333, "causal": True},
    "one query": {"t": 1, "s": 300},
    "more keys, causal": {"t": 128, "s": 384, "causal": True},
    "more queries, causal": {"t": 384, "s": 128, "causal": True},
    "window": {"causal": True, "window": (40, 0)},
    "window, more keys": {"causal": True, "window": (40, 0), "t": 128},
    "two-sided window": {"window": (40, 9)},
    "offset": {"causal": True, "t": 128, "s": 384, "offset": 256},
    "offset, keys cut off": {"causal": True, "t": 1, "s": 384, "offset": 255},
    "empty rows": {"causal": True, "offset": -7, **EMPTY},
    "empty rows, -inf": {
        "causal": True, "offset": -7, "mask_fill": -np.inf, **EMPTY,
    },
    "mask": masked(2, 1, 1, 256, 256, **EMPTY),
    "mask, float16": masked(2, 1, 1, 256, 256, dtype="float16", **EMPTY),
    "mask, -inf": masked(2, 1, 1, 256, 256, mask_fill=-np.inf, **EMPTY),
    "mask of heads": masked(1, 4, 1, 256, 256, **EMPTY),
    "mask of keys, causal": masked(2, 1, 1, 1, 256, causal=True, **EMPTY),
    "bias": biased(1, 4, 1, 256, 256),
    "float32 bias": biased(2, 4, 1, 256, 256, dtype="float32"),
    "float32 bias, grouped": biased(1, 2, 2, 256, 256, dtype="float32", k=2, g=2),
    "softcap": {"softcap": 1.5, "scale": 1.0, "d": 64},
    "softcap, causal": {"softcap": 1.5, "scale": 1.0, "causal": True},
    "dbias of heads": biased(1, 4, 1, 256, 256),
    "dbias of batch": biased(2, 1, 1, 256, 256),
    "dbias of both": biased(2, 4, 1, 256, 256),
    "dbias of neither": biased(1, 1, 1, 256, 256),
    "dbias, causal": biased(1, 4, 1, 256, 256, causal=True),
    "dbias, grouped": biased(2, 2, 2, 256, 256, k=2, g=2),
    "dbias, more keys": biased(1, 4, 1, 128, 384, t=128, s=384),
    "dbias, sizes of no block": biased(1, 4, 1, 74, 106, t=74, s=106),
    "dbias, odd lengths": biased(1, 4, 1, 201, 333, t=201, s=333),
    "dbias, float32": biased(1, 4, 1, 256, 256, dtype="float32"),
    "dbias of keys": biased(2, 1, 1, 1, 256, causal=True),
    "dbias of queries": biased(1, 4, 1, 256, 1),
    "dbias, groups share it": biased(1, 2, 1, 256, 256, k=2, g=2),
    "dbias, softcap": biased(1, 4, 1, 256, 256, softcap=1.5),
    "dbias, empty rows": biased(1, 4, 1, 256, 256, causal=True, offset=-7, **EMPTY),
    "dbias, mask": {
        **biased(1, 4, 1, 256, 256, has_mask=True, mask_fn=last, **EMPTY),
        "sides": (side(1, 4, 1, 256, 256), side(2, 1, 1, 1, 256, dtype="bool")),
    },
}  # fmt: skip

# (B, H, K, D, S, kind)
TIMES = (
    (2, 16, 16, 128, 8192, "causal"),
    (2, 16, 16, 128, 8192, "full"),
    (4, 16, 16, 128, 2048, "causal"),
    (4, 16, 16, 64, 4096, "causal"),
    (4, 16, 16, 64, 4096, "full"),
    (2, 16, 4, 128, 4096, "causal"),
    (2, 16, 16, 96, 4096, "causal"),
    (2, 16, 16, 128, 4096, "window"),
    (2, 16, 16, 128, 4096, "softcap"),
    (2, 16, 16, 128, 4096, "mask"),
    (2, 16, 16, 128, 4096, "mask of keys"),
    (2, 16, 16, 128, 4096, "bias"),
    (2, 16, 16, 128, 4096, "dbias"),
)


def kind_of_site(kind: str, b: int, h: int, s: int) -> dict[str, Any]:
    """Returns keywords of make_spec for a kind in `TIMES`."""
    if kind.startswith("mask"):
        return masked(b, 1, 1, s if kind == "mask" else 1, s)
    if kind.endswith("bias"):
        return biased(1, h, 1, s, s)
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window": (255, 0)},
        "softcap": {"softcap": 30.0},
    }[kind]


def make_spec(
    b=2, t=256, s=256, k=4, g=1, d=128, dv=None, dtype="bfloat16", **fields
) -> AttentionSpec:
    names = ("q", "k", "v", "score", "probs", "out")
    defaults: dict[str, Any] = {f"{name}_dtype": dtype for name in names}
    defaults |= {
        "batch": b, "q_len": t, "k_len": s, "kv_heads": k, "group": g, "head_dim": d,
        "value_dim": dv or d, "scale": d**-0.5, "softmax_dtype": "float32",
    }  # fmt: skip
    if fields.get("causal") or fields.get("window") or fields.get("has_mask"):
        defaults["mask_fill"] = -1e30 if dtype == "bfloat16" else -6e4
    return AttentionSpec(**{**defaults, **fields})


def plain(spec: AttentionSpec, q, k, v, *sides):
    """Attention as it is usually written, for [B,T,H,D] arrays."""
    q = q.reshape(*q.shape[:2], spec.kv_heads, spec.group, spec.head_dim)
    scores = jnp.einsum(
        "btkgd,bskd->bkgts", q, k, preferred_element_type=spec.score_dtype
    )
    positions = [jnp.arange(n, dtype=jnp.int32) for n in (spec.q_len, spec.k_len)]
    x = modified_scores(spec, scores.astype(jnp.float32), sides, *positions)
    probs = jax.nn.softmax(x, axis=-1).astype(spec.probs_dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", probs, v)
    return out.reshape(*out.shape[:2], spec.heads, -1).astype(spec.out_dtype)


def random_inputs(spec: AttentionSpec) -> list[jax.Array]:
    """Returns q, k, v, the sides and dout."""
    rng = np.random.default_rng(0)
    b, t, s = spec.batch, spec.q_len, spec.k_len
    shapes = [
        (b, t, spec.heads, spec.head_dim),
        (b, s, spec.kv_heads, spec.head_dim),
        (b, s, spec.kv_heads, spec.value_dim),
    ]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    dtypes = [spec.q_dtype] * 3
    for operand in spec.sides:
        if operand.dtype == "bool":
            mask = rng.random(operand.shape) < 0.6
            if spec.rows_never_empty:
                mask[..., 0] = True
            elif operand.shape[3] > 1:
                mask[..., :3, :] = False  # queries that see nothing
            else:
                mask[0] = False
            arrays.append(mask)
        else:
            arrays.append(rng.standard_normal(operand.shape))
        dtypes.append(operand.dtype)
    arrays.append(rng.standard_normal((b, t, spec.heads, spec.value_dim)))
    dtypes.append(spec.out_dtype)
    return [jnp.asarray(x, dtype) for x, dtype in zip(arrays, dtypes, strict=True)]


class RefusedError(Exception):
    """An implementation does not take a site; the text says why."""


@dataclass(frozen=True)
class Check:
    """A row of `CHECKS` for one implementation, compiled.

    Attributes:
      run: inputs -> results and gradients of the implementation, of XLA, and of the
        reference.
    """

    spec: AttentionSpec
    grad: GradSpec
    run: Any


def grad_of(spec: AttentionSpec, wants_bias: bool) -> GradSpec:
    """Returns the gradients of q, k, v and maybe of the first side."""
    wanted: tuple[Wanted, ...] = ("q", "k", "v", *([0] if wants_bias else []))
    dtypes = [spec.q_dtype] * 3 + [side.dtype for side in spec.sides[: len(wanted) - 3]]
    return GradSpec(wanted, tuple(dtypes), spec.out_dtype)


def both_halves(
    implementation: str, spec: AttentionSpec, grad: GradSpec, target: Target
) -> Any:
    """Returns inputs -> (result, *gradients), as the stage would bind them.

    Raises:
      RefusedError: it does not take the site.
    """
    run = GRADIENTS[implementation]
    reason = run.supports(spec, grad, target)
    if reason is not None:
        raise RefusedError(reason)
    forward, backward = run.build(spec, grad, target)

    def both(*inputs):
        *operands, dout = inputs
        out, *residuals = forward(*operands)
        return out, *backward(*operands, out, *residuals, dout)

    return both


def compile_check(name: str, implementation: str, target: Target) -> Check:
    """Compiles what a check runs, without tuning: its time does not count.

    Raises:
      RefusedError: the implementation does not take the site.
    """
    spec = make_spec(**CHECKS[name])
    grad = grad_of(spec, name.startswith("dbias"))
    ours = both_halves(implementation, spec, grad, target)
    count = len(grad.wanted)  # of the leading operands

    def written_plainly(*inputs):
        *operands, dout = inputs
        fixed = operands[count:]
        out, vjp = jax.vjp(lambda *x: plain(spec, *x, *fixed), *operands[:count])
        return out, *vjp(dout)

    def reference(*inputs):
        wide = [
            x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in inputs
        ]
        out = attention_ref(spec, *wide[:-1])
        return out, *attention_grad_ref(spec, grad, *wide)

    def everything(*inputs):
        return ours(*inputs), written_plainly(*inputs), reference(*inputs)

    lowered = jax.jit(everything).lower(*random_inputs(spec))
    options = {"xla_gpu_autotune_level": 0}
    return Check(spec, grad, lowered.compile(compiler_options=options))


def check(name: str, implementation: str, target: Target) -> dict[str, Any]:
    """Compares an implementation's and the plain gradients with the reference."""
    compiled = compile_check(name, implementation, target)
    results = jax.device_get(compiled.run(*random_inputs(compiled.spec)))
    row: dict[str, Any] = {"name": name, "implementation": implementation, "ok": True}
    names = ["out", *(f"d{x}" for x in compiled.grad.wanted)]
    for label, *values in zip(names, *results, strict=True):
        got, plainly, expected = (np.asarray(x, np.float64) for x in values)
        error, plain_error = (
            float(np.nanmax(np.abs(x - expected), initial=0)) for x in (got, plainly)
        )
        largest = float(max(np.nanmax(np.abs(expected), initial=0), 1.0))
        limit = 2 * plain_error + ATOL[compiled.spec.q_dtype] * largest
        same_nan = np.array_equal(np.isnan(got), np.isnan(expected))
        row["ok"] &= error <= limit and same_nan
        row[label] = {
            "error": error, "plain": plain_error, "limit": limit, "largest": largest,
            "nan_agrees": same_nan,
        }  # fmt: skip
    return row


def milliseconds(function, args) -> float:
    function = jax.jit(function)
    jax.block_until_ready(function(*args))
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    calls = max(3, min(30, int(0.05 / (time.perf_counter() - start))))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            out = function(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return round(best * 1e3, 4)


def time_case(size: tuple, names: list[str], target: Target) -> dict[str, Any]:
    """Times both halves of a row of `TIMES`; XLA's own code where no side is read."""
    b, h, k, d, s, kind = size
    fields = kind_of_site(kind, b, h, s)
    spec = make_spec(b=b, t=s, s=s, k=k, g=h // k, d=d, **fields)
    grad = grad_of(spec, kind == "dbias")

    def both_of(function):
        def both(*inputs):
            *operands, dout = inputs
            out, vjp = jax.vjp(function, *operands)
            return out, *vjp(dout)

        return both

    row: dict[str, Any] = {"B,H,K,D,S": list(size[:5]), "kind": kind}
    cases: dict[str, Any] = {}
    for name in names:
        try:
            cases[name] = both_halves(name, spec, grad, target)
            predicted = GRADIENTS[name].seconds(spec, grad, target) * 1e3
            row[f"{name}_predicted_ms"] = round(predicted, 4)
        except RefusedError as error:
            row[f"{name}_refused"] = str(error)
    causal = kind == "causal"
    if kind in ("full", "causal"):
        library = functools.partial(
            jax.nn.dot_product_attention,
            scale=spec.scale,
            is_causal=causal,
            implementation="cudnn",
        )
        cases["jax.nn"] = both_of(library)
        cases["naive"] = both_of(functools.partial(plain, spec))
    inputs = random_inputs(spec)
    flops = 14 * spec.score_count * d / (2 if causal else 1)
    for name, function in cases.items():
        try:
            row[f"{name}_ms"] = milliseconds(function, inputs)
            if kind != "window":
                row[f"{name}_tflops"] = round(flops / row[f"{name}_ms"] / 1e9, 1)
        except Exception as error:
            row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:500]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=190.0, help="seconds in all")
    parser.add_argument("--parts", default="checks,times")
    parser.add_argument("--implementations", default=",".join(GRADIENTS))
    options = parser.parse_args()
    start = time.perf_counter()
    target = Target.from_devices(jax.devices()[:1])
    rows: list[dict[str, Any]] = []
    parts, names = options.parts.split(","), options.implementations.split(",")

    def attempt(case: Any, function: Any) -> None:
        row: dict[str, Any] = {"case": case, "ok": False}
        if time.perf_counter() - start > options.limit:
            rows.append({**row, "left_out": "no time left"})
        else:
            try:
                rows.append(function())
            except RefusedError as error:
                rows.append({"case": case, "refused": str(error)})
            except Exception as error:
                rows.append({**row, "raised": f"{type(error).__name__}: {error}"[:999]})
        print(json.dumps(rows[-1]), flush=True)

    # one at a time: cuDNN builds its graphs in a stream capture, which other threads'
    # work breaks
    for size in TIMES if "times" in parts else ():
        attempt(size, functools.partial(time_case, size, names, target))
    for name in CHECKS if "checks" in parts else ():
        for implementation in names:
            attempt(
                f"{name}, {implementation}",
                functools.partial(check, name, implementation, target),
            )
    result = {
        "command": " ".join(["python", *sys.argv]),
        "device": target.device_kind,
        "jax": jax.__version__,
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [row for row in rows if not row.get("ok", True)]
    print(f"{len(rows)} rows, {len(wrong)} not ok, {result['seconds']} s")
    for row in wrong:
        print("NOT OK", json.dumps(row))


if __name__ == "__main__":
    main()
