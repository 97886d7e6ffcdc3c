"""Online-softmax attention against the usual spelling, both under jax.jit, on a CPU.

The usual spelling is einsum, where, softmax, einsum; XLA keeps all scores in memory.
Both run interleaved, one call each a round, so that other load hits them alike; the
ratio is the median over rounds of naive time / online time.

    python benchmarks/online_attention_cpu.py [--rounds 15] [--output FILE]
    python benchmarks/online_attention_cpu.py --sweep   # other forms too, in tiles
    taskset -c 0,1 python benchmarks/online_attention_cpu.py  # on two cores

Writes benchmarks/results/online_attention_cpu.json, from which the constants in
pallas_kernels/attention/{online,cost}.py are taken.
"""

import argparse
import dataclasses
import itertools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from hlo_tools.composites import AttentionSpec
from hlo_tools.targets import Target
from pallas_kernels.attention import cost, online, online_forward, online_tiling

RESULTS = Path(__file__).parent / "results" / "online_attention_cpu.json"

# (B, H, K, D, T, S)
SIZES = (
    (8, 4, 4, 32, 32, 32),
    (4, 8, 8, 64, 64, 64),
    (2, 12, 12, 64, 128, 128),
    (1, 8, 8, 64, 128, 128),
    (1, 8, 8, 64, 256, 256),
    (1, 8, 8, 64, 512, 512),
    (4, 16, 16, 64, 512, 512),
    (1, 8, 8, 64, 1024, 1024),
    (1, 16, 16, 128, 1024, 1024),
    (1, 32, 8, 128, 1024, 1024),
    (1, 8, 8, 64, 2048, 2048),
    (1, 4, 4, 64, 4096, 4096),
    (1, 8, 8, 64, 1, 2048),
    (1, 32, 8, 64, 1, 4096),
)
SWEEP_ROWS = (64, 128, 256, 512)
SWEEP_KEYS = (128, 256, 512, 1024)
SWEEP_PAIRS = (1, 4, 8, 16, 64)
SWEEP_TILE = (1 << 16, 1 << 21)  # scores


def make_spec(size: tuple[int, ...], causal: bool, dtype: str) -> AttentionSpec:
    b, h, k, d, t, s = size
    names = ("q", "k", "v", "score", "softmax", "probs", "out")
    dtypes: dict[str, Any] = {f"{name}_dtype": dtype for name in names}
    return AttentionSpec(
        batch=b, q_len=t, k_len=s, kv_heads=k, group=h // k, head_dim=d, value_dim=d,
        scale=d**-0.5, causal=causal, mask_fill=-1e30 if causal else None,
        **dtypes,
    )  # fmt: skip


def naive(spec: AttentionSpec):
    """Attention as it is usually written."""

    def attention(q, k, v):
        k, v = (jnp.repeat(x, spec.group, axis=2) for x in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * spec.scale
        if spec.causal:
            mask = jnp.tril(jnp.ones((spec.q_len, spec.k_len), bool))
            scores = jnp.where(mask, scores, -1e30)
        probs = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("bhts,bshd->bthd", probs, v)

    return jax.jit(attention)


def staged(spec: AttentionSpec, blocks: online_tiling.Blocks | None, target: Target):
    """Returns what the stage binds, or "online" in given tiles."""
    if blocks is None:
        return jax.jit(online.IMPLEMENTATION.build(spec, target))
    return jax.jit(
        lambda q, k, v: online_forward.online_attention(spec, blocks, True, q, k, v)
    )


def block_choices(spec: AttentionSpec) -> list[online_tiling.Blocks]:
    """All tiles of the sweep that fit a site."""
    found = set()
    for rows, keys, pairs in itertools.product(SWEEP_ROWS, SWEEP_KEYS, SWEEP_PAIRS):
        queries = min(max(rows // spec.group, 1), spec.q_len)
        keys = min(keys, spec.k_len)
        kv_heads = min(pairs, spec.kv_heads)
        batch = min(max(pairs // kv_heads, 1), spec.batch)
        tile = batch * kv_heads * spec.group * queries * keys
        fits = SWEEP_TILE[0] <= tile <= SWEEP_TILE[1] or tile == spec.score_count
        if fits and spec.kv_heads % kv_heads == 0 and spec.batch % batch == 0:
            found.add(online_tiling.Blocks(batch, kv_heads, queries, keys))
    return sorted(found)


def measure(functions, args, rounds: int) -> np.ndarray:
    """Returns seconds [function, round] of interleaved calls."""
    for function in functions:
        jax.block_until_ready(function(*args))
    start = time.perf_counter()
    jax.block_until_ready(functions[0](*args))
    once = time.perf_counter() - start
    calls = max(1, int(0.01 / max(once, 1e-6)))  # at least 10 ms each
    seconds = np.empty((len(functions), rounds))
    for r in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(calls):
                out = function(*args)
            jax.block_until_ready(out)
            seconds[i, r] = (time.perf_counter() - start) / calls
    return seconds


def run_case(size, causal: bool, dtype: str, rounds: int, sweep: bool) -> dict:
    """Measures one site as bound, and in other tiles if `sweep`."""
    target = Target.parse("cpu")
    spec = make_spec(size, causal, dtype)
    rng = np.random.default_rng(0)
    b, h, k, d, t, s = size
    args = [
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((b, t, h, d), (b, s, k, d), (b, s, k, d))
    ]
    blocks = [None, *(block_choices(spec) if sweep else ())]
    functions = [naive(spec), *(staged(spec, choice, target) for choice in blocks)]
    seconds = measure(functions, args, rounds)
    ratios = np.median(seconds[0] / seconds[1:], axis=1)
    row = {
        "B,H,K,D,T,S": list(size),
        "causal": causal,
        "dtype": dtype,
        "config": online.IMPLEMENTATION.config(spec, target),
        "naive_ms": round(float(np.median(seconds[0])) * 1e3, 4),
        "online_ms": round(float(np.median(seconds[1])) * 1e3, 4),
        "ratio": round(float(ratios[0]), 3),
        "predicted_naive_ms": round(cost.naive_seconds(spec, target) * 1e3, 4),
        "predicted_online_ms": round(
            online.IMPLEMENTATION.seconds(spec, target) * 1e3, 4
        ),
    }
    if sweep:
        rows = zip(blocks[1:], ratios[1:], strict=True)
        ranked = sorted(rows, key=lambda pair: -pair[1])
        row["tiles"] = [[list(c), round(float(r), 3)] for c, r in ranked]
    return row


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--sizes", nargs="*", type=int, help="indices into SIZES")
    options = parser.parse_args()
    sizes = SIZES if options.sizes is None else [SIZES[i] for i in options.sizes]
    rows = []
    for dtype, size, causal in itertools.product(options.dtypes, sizes, (False, True)):
        if causal and size[4] == 1:
            continue
        row = run_case(size, causal, dtype, options.rounds, options.sweep)
        rows.append(row)
        label = f"{dtype:9} {size!s:32} {'causal' if causal else 'full':6}"
        print(
            f"{label} naive {row['naive_ms']:9.3f} ms online {row['online_ms']:9.3f} ms"
            f" ratio {row['ratio']:5.2f}; predicted {row['predicted_naive_ms']:9.3f}"
            f" and {row['predicted_online_ms']:9.3f}",
            flush=True,
        )
        for blocks, ratio in row.get("tiles", [])[:6]:
            print(f"{'':20} {blocks} {ratio:.2f}")
    cores = len(os.sched_getaffinity(0))
    result = {
        "command": " ".join(["python", *sys.argv]),
        "cpu": cpu_model(),
        "cores": cores,
        "load_average": os.getloadavg()[0],
        "jax": jax.__version__,
        "target": dataclasses.asdict(Target.parse("cpu").spec),
        "geomean_ratio_S>=512": _geomean(rows),
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


def _geomean(rows: list[dict]) -> float | None:
    long = [r["ratio"] for r in rows if r["B,H,K,D,T,S"][4] >= 512]
    return round(statistics.geometric_mean(long), 3) if long else None


if __name__ == "__main__":
    main()
