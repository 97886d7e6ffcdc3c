"""What a warm call costs: `hlo_tools.jit` over `jax.jit`.

Each row calls the same small function, jitted three times: by `jax.jit`, by
`hlo_tools.jit`, and by `jax.jit` again, which shows how much of a ratio is noise.
Batches of calls are interleaved, so that a change in the machine's load hits all
three, and their order rotates. Results are not waited for within a batch: it is the
dispatch that is timed.

    python benchmarks/dispatch_overhead.py [--batches 300] [--calls 500]
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

import hlo_tools

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.05  # of the median ratio; 1 is what the design promises
MODES = {"jax.jit": jax.jit, "hlo_tools.jit": hlo_tools.jit, "jax.jit again": jax.jit}


def add_one(x):
    return x + 1


def add_trees(a, b):
    return jax.tree.map(jnp.add, a, b)


def power(x, exponent, *, scale):
    return scale * x**exponent


def cases() -> dict[str, tuple[Callable, tuple, dict, dict]]:
    """Returns name -> (function, arguments, keywords, options of jit)."""
    x = jnp.ones((8, 8))
    tree = {f"layer{i}": {"w": x, "b": x[0]} for i in range(10)}
    return {
        "one array": (add_one, (x,), {}, {}),
        "40 arrays in dicts": (add_trees, (tree, tree), {}, {}),
        "static and keyword": (power, (x, 3), {"scale": x}, {"static_argnums": 1}),
        "numpy scalar": (add_one, (1.5,), {}, {}),
        "compiled ahead": (add_one, (x,), {}, {}),
    }


def measure(name: str, batches: int, calls: int) -> dict:
    """Times one case.

    Args:
        name: one of `cases`.
        batches: timed batches of each mode.
        calls: calls in a batch.

    Returns:
        Median microseconds of a call for each mode, the median ratio of batches
        that ran next to each other, and that of `jax.jit` to itself.
    """
    function, args, kwargs, options = cases()[name]
    jitted = {mode: jit(function, **options) for mode, jit in MODES.items()}
    if name == "compiled ahead":
        jitted = {m: f.lower(*args, **kwargs).compile() for m, f in jitted.items()}
    for call in jitted.values():
        for _ in range(100):
            jax.block_until_ready(call(*args, **kwargs))
    times: dict[str, list[float]] = {mode: [] for mode in jitted}
    order = list(jitted)
    for _ in range(batches):
        order.append(order.pop(0))
        for mode in order:
            call = jitted[mode]
            start = time.perf_counter()
            for _ in range(calls):
                out = call(*args, **kwargs)
            times[mode].append((time.perf_counter() - start) / calls)
            jax.block_until_ready(out)
    first, staged, again = (times[mode] for mode in MODES)
    return {
        "case": name,
        "microseconds": {m: statistics.median(t) * 1e6 for m, t in times.items()},
        "ratio": _median_ratio(staged, first),
        "noise": _median_ratio(again, first),
    }


def _median_ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def environment() -> dict:
    """Returns what the numbers depend on: date, versions, machine, command."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    arguments = ["python", "benchmarks/dispatch_overhead.py", *sys.argv[1:]]
    return {
        "command": " ".join(arguments),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": versions,
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        "machine": platform.machine(),
    }


def show(rows: list[dict]) -> None:
    """Prints the table."""
    heads = [*MODES, "ratio", "noise"]
    print(f"{'warm call, us':<20}" + "".join(f"{head:>15}" for head in heads))
    for row in rows:
        values = [*row["microseconds"].values(), row["ratio"], row["noise"]]
        print(f"{row['case']:<20}" + "".join(f"{value:>15.3f}" for value in values))


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and writes its JSON.

    Returns:
        0 if every ratio is within `LIMIT` of 1 over the noise, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--calls", type=int, default=500)
    results = ROOT / "benchmarks" / "results" / "dispatch_overhead.json"
    parser.add_argument("--output", type=Path, default=results)
    args = parser.parse_args(argv)
    rows = []
    for name in cases():
        rows.append(measure(name, args.batches, args.calls))
        print(f"{name}: {rows[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    show(rows)
    met = all(row["ratio"] <= LIMIT * max(1.0, row["noise"]) for row in rows)
    print(f"limit {LIMIT} on the ratio: {'met' if met else 'NOT met'}")
    result = {**environment(), "limit": LIMIT, "met": met, "cases": rows}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
