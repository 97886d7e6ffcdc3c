"""What the stage costs: pipeline time against XLA's compile time.

Lowers one whole optimizer step of a 0.9B Llama-style model, 15k StableHLO
operations, from abstract arguments (nothing is allocated), runs the default
pipeline on it and compiles the same module with XLA for the device at hand. The model
file is `baselines/train_llama_0.9b.py` of the shared folder: $HLO_TOOLS_SHARED, or
`../shared` beside the repository, or --model-file.

    python benchmarks/pass_time.py [--target cpu h200] [--no-compile]
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import jax

from hlo_tools.driver import StageConfig, transform
from hlo_tools.targets import Target

ROOT = Path(__file__).resolve().parents[1]
MODEL = "baselines/train_llama_0.9b.py"
# For a training step whose backward passes are proven as well.
LIMIT_SECONDS = 1.5
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}  # Target's name -> lowering's


def model_file() -> Path:
    """Returns where the model file is expected."""
    shared = os.environ.get("HLO_TOOLS_SHARED", ROOT.parent / "shared")
    return Path(shared) / MODEL


def load(path: Path):
    """Imports a Python file by path."""
    spec = importlib.util.spec_from_file_location("benchmark_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lower(model, target: Target):
    """Lowers the training step for a target from abstract arguments.

    Returns:
        (lowered, seconds it took).
    """
    step, args, _ = model.build("naive", 8, 2048)
    start = time.perf_counter()
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(*args)
    lowered = traced.lower(lowering_platforms=(PLATFORMS[target.platform],))
    return lowered, time.perf_counter() - start


def measure(model, name: str, repeats: int) -> dict:
    """Times the default pipeline for one target.

    Args:
        model: the imported model file.
        name: the target's name.
        repeats: pipeline runs; the first pays for imports and JAX's own caches.

    Returns:
        Sizes, seconds (first run and median of the rest) and each pass of the
        first run.
    """
    target = Target.parse(name)
    lowered, lower_seconds = lower(model, target)
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    times, cpu_times, reports = [], [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        _, report = transform(module, target, StageConfig())
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu_start)
        reports.append(report)
        progress(f"{name}: pipeline {times[-1]:.3f} s")
    statuses = [site.status for site in reports[0].sites]
    passes = [
        {
            "name": p.name,
            "ms": p.seconds * 1e3,
            "ops_before": p.ops_before,
            "ops_after": p.ops_after,
            "changed": p.changed,
        }
        for p in reports[0].passes
    ]
    return {
        "target": name,
        "operations": lowered.as_text().count(" = "),
        "lower_seconds": lower_seconds,
        "first_seconds": times[0],
        "first_cpu_seconds": cpu_times[0],
        "median_seconds": statistics.median(times[1:] or times),
        "sites": {status: statuses.count(status) for status in sorted(set(statuses))},
        "passes": passes,
        "summary": reports[0].summary(),
    }


def compile_seconds(model, repeats: int) -> float:
    """Returns XLA's median time to compile the untouched step for this device."""
    times = []
    for _ in range(repeats):
        jax.clear_caches()
        lowered, _ = lower(model, Target.from_devices(jax.devices()[:1]))
        start = time.perf_counter()
        lowered.compile()
        times.append(time.perf_counter() - start)
        progress(f"XLA compile {times[-1]:.3f} s")
    return statistics.median(times)


def progress(line: str) -> None:
    """Says on standard error how far the benchmark is."""
    print(line, file=sys.stderr, flush=True)


def environment() -> dict:
    """Returns what the numbers depend on: date, versions, machine, load."""
    arguments = [Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:]]
    versions = {n: importlib.metadata.version(n) for n in ("jax", "jaxlib", "flax")}
    return {
        "command": " ".join(["python", "benchmarks/pass_time.py", *arguments]),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": versions,
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        "machine": platform.machine(),
        # Above the number of cores, other work slowed these numbers down.
        "load_average": os.getloadavg()[0],
    }


def show(result: dict) -> None:
    """Prints the tables."""
    xla = result["xla_compile_seconds"]
    for row in result["targets"]:
        print(f"\ntarget {row['target']}, {row['operations']:,} operations")
        print(f"  {row['summary']}")
        print(f"  {'pass':<28} {'ms':>8} {'ops before':>11} {'ops after':>10}")
        for p in row["passes"]:
            counts = f"{p['ops_before']:>11,} {p['ops_after']:>10,}"
            print(f"  {p['name']:<28} {p['ms']:>8.1f} {counts}")
        total = sum(p["ms"] for p in row["passes"])
        print(f"  {'sum of passes':<28} {total:>8.1f}")
        for label in ("first", "median"):
            seconds = row[f"{label}_seconds"]
            share = f", {seconds / xla:.1%} of XLA's compile time" if xla else ""
            print(f"  pipeline, {label} run: {seconds:.3f} s{share}")
        print(f"  processor time of the first run: {row['first_cpu_seconds']:.3f} s")
    if xla:
        print(f"\nXLA compile of the untouched step here: {xla:.2f} s")
    print(f"limit: {LIMIT_SECONDS} s for the first run:")
    for row in result["targets"]:
        print(f"  {row['target']}: {'met' if row['met'] else 'NOT met'} (first run)")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and writes its JSON.

    Returns:
        0 if the first run met the limit for every target, 1 if not, 2 if the
        model file is missing.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", default=["cpu", "h200"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true", help="skip XLA's time")
    parser.add_argument("--model-file", type=Path, default=model_file())
    results = ROOT / "benchmarks" / "results" / "pass_time.json"
    parser.add_argument("--output", type=Path, default=results)
    args = parser.parse_args(argv)
    if not args.model_file.is_file():
        progress(f"no model file at {args.model_file}: set HLO_TOOLS_SHARED")
        return 2
    model = load(args.model_file)
    rows = [measure(model, name, args.repeats) for name in args.target]
    xla = None if args.no_compile else compile_seconds(model, min(args.repeats, 2))
    for row in rows:
        row["met"] = row["first_seconds"] <= LIMIT_SECONDS
    result = {**environment(), "xla_compile_seconds": xla, "targets": rows}
    show(result)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    progress(f"wrote {args.output}")
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
