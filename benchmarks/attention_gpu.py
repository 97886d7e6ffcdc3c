"""Attention on a GPU: XLA's own code and all that the stage may bind there.

Wall-clock time a call, the best of three runs of many calls; below 0.1 ms that is
the time to launch it, not to run it. Beside each figure stands what the cost model
says for the device, which takes its constants from here.

    python benchmarks/attention_gpu.py [--output FILE]

Writes benchmarks/results/attention_gpu.json.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hlo_tools.composites import AttentionSpec, SideSpec, modified_scores
from hlo_tools.targets import Target
from pallas_kernels.attention import cost, cudnn, gpu_binding, online

RESULTS = Path(__file__).parent / "results" / "attention_gpu.json"

# (B, H, K, D, T, S)
SIZES = (
    (8, 16, 16, 128, 512, 512),
    (4, 16, 16, 128, 2048, 2048),
    (4, 16, 16, 64, 4096, 4096),
    (1, 16, 8, 128, 8192, 8192),
    (32, 32, 8, 128, 1, 4096),
)
KINDS = ("full", "causal", "mask", "mask of keys", "bias", "window", "softcap")


def make_spec(size: tuple[int, ...], kind: str, dtype: str) -> AttentionSpec:
    b, h, k, d, t, s = size
    names = ("q", "k", "v", "score", "probs", "out")
    dtypes: dict[str, Any] = {f"{name}_dtype": dtype for name in names}
    fields: dict[str, Any] = {"causal": kind in ("causal", "window")}
    if kind == "window":
        fields["window"] = (255, 0)
    if kind == "softcap":
        fields["softcap"] = 30.0
    if kind.startswith("mask"):
        sides = (SideSpec((b, 1, 1, t if kind == "mask" else 1, s), "bool"),)
        fields.update(has_mask=True, mask_fn=lambda sides, q, k: sides[0], sides=sides)
    if kind == "bias":
        sides = (SideSpec((1, k, h // k, t, s), dtype),)
        fields.update(has_bias=True, bias_fn=lambda sides, q, k: sides[0], sides=sides)
        fields["bias_dtype"] = dtype
    return AttentionSpec(
        batch=b, q_len=t, k_len=s, kv_heads=k, group=h // k, head_dim=d, value_dim=d,
        scale=d**-0.5, mask_fill=-1e30, softmax_dtype="float32", **fields,
        **dtypes,
    )  # fmt: skip


def naive(spec: AttentionSpec, q, k, v, *sides):
    """Attention as it is usually written, for (B, T, H, D) arrays."""
    k, v = (jnp.repeat(x, spec.group, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
    grouped = scores.reshape(spec.batch, spec.kv_heads, spec.group, *scores.shape[2:])
    positions = [jnp.arange(n, dtype=jnp.int32) for n in (spec.q_len, spec.k_len)]
    x = modified_scores(spec, grouped, sides, *positions).reshape(scores.shape)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x, -1).astype(v.dtype), v)


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


def run_case(size, kind: str, dtype: str, target: Target) -> dict:
    spec = make_spec(size, kind, dtype)
    b, h, k, d, t, s = size
    args = [
        jnp.ones(shape, dtype) for shape in ((b, t, h, d), (b, s, k, d), (b, s, k, d))
    ]
    args += [jnp.ones(side.shape, side.dtype) for side in spec.sides]
    row = {"B,H,K,D,T,S": list(size), "kind": kind, "dtype": dtype}
    row["naive_ms"] = milliseconds(functools.partial(naive, spec), args)
    row["naive_predicted_ms"] = round(cost.naive_seconds(spec, target) * 1e3, 4)
    for module in (cudnn, gpu_binding, online):
        implementation = module.IMPLEMENTATION
        if implementation.supports(spec, target) is None:
            name = implementation.name
            row[f"{name}_ms"] = milliseconds(implementation.build(spec, target), args)
            predicted = implementation.seconds(spec, target) * 1e3
            row[f"{name}_predicted_ms"] = round(predicted, 4)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    target = Target.from_devices(jax.devices()[:1])
    rows = []
    for size in SIZES:
        kinds = KINDS if size[4] == 2048 else KINDS[: 1 if size[4] == 1 else 2]
        for kind in kinds:
            rows.append(run_case(size, kind, "bfloat16", target))
            print(rows[-1], flush=True)
    for kind in KINDS[:2]:
        rows.append(run_case(SIZES[1], kind, "float32", target))
        print(rows[-1], flush=True)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "device": target.device_kind,
        "jax": jax.__version__,
        "target": dataclasses.asdict(target.spec),
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
