"""Attention: ours, cuDNN, tokamax and XLA in one run; correctness first, then times.

Ours is `pallas_kernels.attention`, called as a user does; cuDNN and XLA are those of
`jax.nn.dot_product_attention`, tokamax (where it is installed) its "mosaic". Every
program that is measured is checked first, at its full size, against float32 products
(attention_exact.py says how); one that is wrong is marked, and has no times. Then the
implementations take turns, round by round; a figure is the median of the rounds'
medians, and the spread is (largest - smallest) / median. Times are those of the kernels
on the device where its profiler can be used, otherwise of the clock, and never mixed.

    python benchmarks/attention.py                  # the shapes of the README
    python benchmarks/attention.py --features       # masks, biases, windows, ...
    python benchmarks/attention.py --sizes small    # the same rows, tiny, for a CPU
    python benchmarks/attention.py --rows "D64 B4 S4096 H16 full,..." --only cudnn,xla

TFLOP/s count 4 B H T S D forward, half of it if causal, and 3.5 times that for forward
and backward. Writes benchmarks/results/attention.json (attention_features.json).
Exits with 1 if a program was wrong, or one of ours failed other than by a refusal.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import importlib.metadata
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import jax
from attention_contenders import CONTENDERS
from attention_measuring import Cell, Programs, compile_row, measure_row
from attention_rows import FEATURES, MAIN, Row, small
from attention_table import print_tables, summary

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "tokamax")


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """Returns the rows that the options ask for.

    Raises:
      SystemExit: a name is in no row.
    """
    rows = {row.name: row for row in (FEATURES if options.features else MAIN)}
    names = options.rows.split(",") if options.rows else list(rows)
    unknown = [name for name in names if name not in rows]
    if unknown:
        raise SystemExit(f"--rows: no {unknown}, expected some of {list(rows)}")
    found = [rows[name] for name in names]
    return [small(row) for row in found] if options.sizes == "small" else found


def chosen_contenders(options: argparse.Namespace) -> dict[str, str | None]:
    """Returns the names of contenders, and why one can not be had.

    Raises:
      SystemExit: a name is in no row of the table.
    """
    platform = jax.default_backend()
    names = [name for name, x in CONTENDERS.items() if platform in x.platforms]
    if options.only:
        names = options.only.split(",")
        unknown = [name for name in names if name not in CONTENDERS]
        if unknown:
            raise SystemExit(f"--only: no {unknown}, expected some of {[*CONTENDERS]}")
    return {name: CONTENDERS[name].missing() for name in names}


def compile_all(
    rows: list[Row], names: dict[str, str | None], workers: int
) -> dict[Row, Programs]:
    """Compiles what all rows need, in threads, before anything is measured."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        started = {row: compile_row(row, names, pool) for row in rows}
        for row, programs in started.items():
            programs.wait()
            progress(f"compiled: {row.name}")
    return started


def progress(line: str) -> None:
    """Says on standard error how far the benchmark is, and when."""
    print(
        f"{time.perf_counter() - STARTED:6.1f} s  {line}", file=sys.stderr, flush=True
    )


STARTED = time.perf_counter()


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the numbers depend on: date, versions, device, load."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    chosen = {key: x for key, x in vars(options).items() if key != "output"}
    return {
        "command": "python benchmarks/attention.py",
        "options": chosen,
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "cores": os.cpu_count(),
        # Above the number of cores, other work slowed wall times down.
        "load_average": os.getloadavg()[0],
        "versions": versions,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line; the seed and the output get their defaults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", action="store_true", help="rows of features")
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--rows", help="names of rows, joined by commas")
    parser.add_argument("--only", help="names of implementations, joined by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.02, help="a round's calls")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--seed", type=int, help="of the inputs; by default a new one")
    parser.add_argument("--limit", type=float, help="seconds, after which rows are"
                        " left out")  # fmt: skip
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    if options.seed is None:
        options.seed = secrets.randbits(31)
    if options.output is None:
        name = "attention_features" if options.features else "attention"
        options.output = RESULTS / f"{name}.json"
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes its JSON.

    Returns:
      0; or 1 if anything was wrong, or failed that should not.
    """
    options = parse(argv)
    began = time.perf_counter()
    rows, names = chosen_rows(options), chosen_contenders(options)
    programs = compile_all(rows, names, options.workers)
    compiled = time.perf_counter() - began
    results: dict[Row, dict[str, dict[str, Cell]]] = {}
    left_out = []
    for row in rows:
        if options.limit and time.perf_counter() - began > options.limit:
            left_out.append(row.name)
            continue
        results[row] = measure_row(
            row, programs.pop(row), options.seed, options.rounds, options.seconds
        )
        progress(f"measured: {row.name}")
    record = environment(options) | {
        "compile_seconds": compiled,
        "seconds": time.perf_counter() - began,
        "rows_left_out": left_out,
        "rows": summary(results),
    }
    print_tables(results, record)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    cells = [
        cell for by_name in results.values() for x in by_name.values()
        for cell in x.values()
    ]  # fmt: skip
    return int(any(cell.status in ("wrong", "failed") for cell in cells))


if __name__ == "__main__":
    raise SystemExit(main())
