"""One whole training step at S = 2048 on a CPU: `hlo_tools.jit` against `jax.jit`.

The model, its loss and its optimizer are those of examples/01_train_step.py, batch 1,
attention written by hand. Both steps are compiled once from the same start; their
results are compared, then they run interleaved, each on its own state, and in each
round the one goes first that went second in the round before. Ratios are medians over
rounds of hlo_tools' time over jax.jit's. Temporary memory is XLA's own accounting,
`memory_analysis()`.

    python benchmarks/train_step_cpu.py [--rounds 15] [--seq 2048] [--output FILE]

Writes benchmarks/results/train_step_cpu.json, and exits with 1 if the memory falls by
less than 3x, if the time rises or if the losses differ.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from online_attention_cpu import cpu_model

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "train_step_cpu.json"
EXAMPLE = HERE.parent / "examples" / "01_train_step.py"
SMALLER = 3.0  # at least
SLOWER = 1.0  # at most


def load_example():
    """Returns the example as a module."""
    spec = importlib.util.spec_from_file_location("train_step_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_steps(example, tokens) -> tuple[dict, object]:
    """Returns the compiled step by name of its jit, and hlo_tools' report."""
    compiled, report = {}, None
    for name, jit in example.JITS.items():
        step = jit(example.train_step, donate_argnums=(0, 1))
        compiled[name] = step.lower(*example.fresh_state(), tokens).compile()
        report = step.report() if hasattr(step, "report") else report
    return compiled, report


def measure(runs: dict, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each run in each round, after one to warm up."""
    seconds = {name: [] for name in runs}
    for number in range(-1, rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            jax.block_until_ready(runs[name]())
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    example = load_example()
    tokens = example.sample(example.load_text(), 1, options.seq, 0)
    compiled, report = compile_steps(example, tokens)
    runs = {n: example.train_runner(step, tokens) for n, step in compiled.items()}
    losses = {name: float(run()) for name, run in runs.items()}
    seconds = measure(runs, options.rounds)
    temp = {
        name: step.memory_analysis().temp_size_in_bytes
        for name, step in compiled.items()
    }
    plain, ours = example.JITS
    pairs = zip(seconds[ours], seconds[plain], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    smaller = temp[plain] / temp[ours]
    difference = abs(losses[ours] - losses[plain])
    fine = smaller >= SMALLER and ratio <= SLOWER
    fine = fine and difference <= example.LOSS_TOLERANCE
    result = {
        "command": " ".join(["python", *sys.argv]),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "jax": jax.__version__,
        "seq": options.seq,
        "bound": len(report.with_status("bound")),
        "median_ms": {
            name: round(statistics.median(times) * 1e3, 2)
            for name, times in seconds.items()
        },
        "ms": {n: [round(t * 1e3, 2) for t in ts] for n, ts in seconds.items()},
        "time_ratio": round(ratio, 4),
        "temp_bytes": temp,
        "temp_smaller": round(smaller, 3),
        "first_losses": losses,
        "met": fine,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for name in compiled:
        mib = temp[name] / 2**20
        print(f"{name:14} {result['median_ms'][name]:9.2f} ms {mib:9.2f} MiB of temp")
    print(f"{ratio:.3f}x the time, temp {smaller:.2f}x smaller: ", end="")
    print("met" if fine else f"MISSED (at most {SLOWER}x, at least {SMALLER}x)")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
