"""Attention with its backward pass: "online" against XLA's own code, on a CPU.

The usual spelling is einsum, where, softmax, einsum and jax.vjp of them; XLA keeps
the probabilities from the forward for the backward pass. Both run under jax.jit with
the same random inputs and return the result and the gradients of q, k and v. First
the results are compared with the reference in float64; then both run interleaved, as
in online_attention_cpu.py, and the ratio is the median over rounds of naive time /
online time.

    python benchmarks/online_attention_grad_cpu.py [--rounds 9] [--output FILE]
    taskset -c 0,1 python benchmarks/online_attention_grad_cpu.py  # on two cores

Writes benchmarks/results/online_attention_grad_cpu.json, from which the CPU constants
in pallas_kernels/attention/cost_grad.py are taken.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from online_attention_cpu import cpu_model, make_spec, naive

from hlo_tools.composites import AttentionSpec, attention_ref
from hlo_tools.gradients import GradSpec, attention_grad_ref
from hlo_tools.targets import Target
from pallas_kernels.attention import cost_grad, online

RESULTS = Path(__file__).parent / "results" / "online_attention_grad_cpu.json"

# (B, H, K, D, T, S)
SIZES = (
    (8, 4, 4, 32, 32, 32),
    (4, 8, 8, 64, 64, 64),
    (2, 12, 12, 64, 128, 128),
    (1, 8, 8, 64, 256, 256),
    (1, 8, 8, 64, 512, 512),
    (2, 8, 8, 64, 512, 512),
    (1, 8, 8, 64, 1024, 1024),
    (2, 8, 8, 64, 1024, 1024),
    (1, 32, 8, 128, 512, 512),
    (1, 8, 8, 64, 2048, 2048),
    (1, 8, 8, 64, 1, 2048),
)
# Largest error beside the reference, over the largest value: two roundings of
# bfloat16, or sums of a few thousand float32 terms.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def naive_pair(spec: AttentionSpec):
    """Attention and its gradients as they are usually written."""
    attention = naive(spec)

    def pair(q, k, v, dout):
        out, vjp = jax.vjp(attention, q, k, v)
        return out, *vjp(dout)

    return jax.jit(pair)


def online_pair(spec: AttentionSpec, grad: GradSpec, target: Target):
    """What a program gets that binds to "online"."""
    assert online.IMPLEMENTATION.grad is not None
    forward, backward = online.IMPLEMENTATION.grad.build(spec, grad, target)

    def pair(q, k, v, dout):
        out, *residuals = forward(q, k, v)
        return out, *backward(q, k, v, out, *residuals, dout)

    return jax.jit(pair)


def errors(functions, spec: AttentionSpec, grad: GradSpec, args) -> list[float]:
    """Returns each function's largest error, relative to the largest value."""
    with jax.enable_x64(True):
        wide_spec = dataclasses.replace(spec, q_dtype="float64")
        wide = [np.asarray(x).astype(np.float64) for x in args]
        out = jax.jit(functools.partial(attention_ref, wide_spec))(*wide[:3])
        grads = jax.jit(functools.partial(attention_grad_ref, wide_spec, grad))(*wide)
        expected = [np.asarray(x) for x in (out, *grads)]
    return [
        max(
            float(np.abs(np.asarray(got).astype(np.float64) - want).max())
            / float(np.abs(want).max())
            for got, want in zip(function(*args), expected, strict=True)
        )
        for function in functions
    ]


def measure(functions, args, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns seconds [function, round] of interleaved calls, elapsed and of cores."""
    seconds = np.empty((2, len(functions), rounds))
    for r in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(function(*args))
            end = time.perf_counter(), time.process_time()
            seconds[:, i, r] = np.subtract(end, start)
    return seconds[0], seconds[1]


def temp_bytes(function, args) -> int:
    analysis = function.lower(*args).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)


def run_case(size, causal: bool, dtype: str, rounds: int) -> dict:
    """Checks and measures one site.

    Raises:
      SystemExit: if a result is wrong.
    """
    target, spec = Target.parse("cpu"), make_spec(size, causal, dtype)
    grad = GradSpec(("q", "k", "v"), (dtype,) * 3, dtype)
    rng = np.random.default_rng(0)
    b, h, k, d, t, s = size
    shapes = ((b, t, h, d), (b, s, k, d), (b, s, k, d), (b, t, h, d))
    args = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    functions = [naive_pair(spec), online_pair(spec, grad, target)]
    naive_error, online_error = errors(functions, spec, grad, args)
    if not online_error <= max(TOLERANCE[dtype], 2 * naive_error):
        sys.exit(f"{size} {dtype}: error {online_error}, naive {naive_error}")
    seconds, of_cores = measure(functions, args, rounds)
    temps = [temp_bytes(function, args) for function in functions]
    predicted = (
        cost_grad.naive_grad_seconds(spec, grad, target),
        online.IMPLEMENTATION.grad.seconds(spec, grad, target),
    )
    return {
        "B,H,K,D,T,S": list(size),
        "causal": causal,
        "dtype": dtype,
        "naive_ms": round(float(np.median(seconds[0])) * 1e3, 4),
        "online_ms": round(float(np.median(seconds[1])) * 1e3, 4),
        "ratio": round(float(np.median(seconds[0] / seconds[1])), 3),
        "cpu_ratio": round(float(np.median(of_cores[0] / of_cores[1])), 3),
        "naive_error": naive_error,
        "online_error": online_error,
        "naive_temp_bytes": temps[0],
        "online_temp_bytes": temps[1],
        "predicted_naive_ms": round(predicted[0] * 1e3, 4),
        "predicted_online_ms": round(predicted[1] * 1e3, 4),
        "predicted_naive_temp_bytes": cost_grad.naive_grad_temp_bytes(
            spec, grad, target
        ),
        "predicted_online_temp_bytes": online.IMPLEMENTATION.grad.temp_bytes(
            spec, grad, target
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--sizes", nargs="*", type=int, help="indices into SIZES")
    options = parser.parse_args()
    sizes = SIZES if options.sizes is None else [SIZES[i] for i in options.sizes]
    rows = []
    for dtype, size, causal in itertools.product(options.dtypes, sizes, (False, True)):
        if causal and size[4] == 1:
            continue
        row = run_case(size, causal, dtype, options.rounds)
        rows.append(row)
        temps = [row[f"{name}_temp_bytes"] / 2**20 for name in ("naive", "online")]
        print(
            f"{dtype:9} {size!s:29} {'causal' if causal else 'full':6}"
            f" naive {row['naive_ms']:9.3f} ms {temps[0]:7.2f} MiB,"
            f" online {row['online_ms']:9.3f} ms {temps[1]:7.2f} MiB,"
            f" ratio {row['ratio']:5.2f}, of cores {row['cpu_ratio']:5.2f};"
            f" predicted {row['predicted_naive_ms']:9.3f}"
            f" and {row['predicted_online_ms']:9.3f}",
            flush=True,
        )
    long = [row["ratio"] for row in rows if row["B,H,K,D,T,S"][4] >= 512]
    result = {
        "command": " ".join(["python", *sys.argv]),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "jax": jax.__version__,
        "target": dataclasses.asdict(Target.parse("cpu").spec),
        "geomean_ratio_S>=512": long and round(statistics.geometric_mean(long), 3),
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
