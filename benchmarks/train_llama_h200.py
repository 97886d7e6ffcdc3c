"""Training step of a 0.9B Llama-style model: jit, staged jit, hand-placed cuDNN.

The model's attention is spelled out with einsums ("naive") or calls
`jax.nn.dot_product_attention(implementation="cudnn")` ("cudnn"). Three modes of one
AdamW step:

    naive    the naive model under jax.jit
    staged   the same naive model under hlo_tools.jit
    cudnn    the hand-placed cuDNN model under jax.jit
    bound_to_cudnn  (--modes) as staged, with cuDNN as the only implementation

For each (batch, length): the loss over some steps from one initial state on the same
fresh tokens, then step times, the three modes in turn on one state.

    python benchmarks/train_llama_h200.py --model-file PATH [--shapes 8x2048,...]

The model file is `baselines/train_llama_0.9b.py` of the shared folder:
$HLO_TOOLS_SHARED, or `../shared` beside the repository, or --model-file. `--tiny`
runs the same logic with a tiny model anywhere, without the cuDNN mode.
"""

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import os
import statistics
import time
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax

import hlo_tools
from hlo_tools import binding

ROOT = Path(__file__).resolve().parents[1]
MODEL = "baselines/train_llama_0.9b.py"
SHAPES = "8x2048,2x4096,1x8192,4x8192"
TINY = {"V": 256, "d": 128, "L": 2, "h": 4, "hk": 2, "f": 256}
MODES = {
    "naive": ("naive", jax.jit),
    "staged": ("naive", hlo_tools.jit),
    "bound_to_cudnn": ("naive", hlo_tools.jit),
    "cudnn": ("cudnn", jax.jit),
}
# mode -> the implementations of attention that it may use; all where none are named
ONLY = {"bound_to_cudnn": ("cudnn",)}
GOAL_OVER_CUDNN = 0.98


def model_file() -> Path:
    """Returns where the model file is expected."""
    shared = os.environ.get("HLO_TOOLS_SHARED", ROOT.parent / "shared")
    return Path(shared) / MODEL


def load(path: Path) -> types.ModuleType:
    """Executes the model file."""
    module = types.ModuleType("benchmark_model")
    exec(compile(path.read_text(), MODEL, "exec"), module.__dict__)
    return module


def tokens_of(batch: int, length: int, vocabulary: int, seed: int) -> jax.Array:
    """Returns fresh random tokens [B, S+1]."""
    key = jax.random.key(seed)
    return jax.random.randint(key, (batch, length + 1), 0, vocabulary)


def compiled(module, mode: str, batch: int, length: int, sizes: dict):
    """Compiles a mode's step.

    Returns:
        (the compiled step, function that makes the initial state, row of facts).
    """
    spelling, jit = MODES[mode]
    step, arguments, init = module.build(spelling, batch, length, **sizes)
    jax.clear_caches()
    start = time.perf_counter()
    lowered = jit(step, donate_argnums=(0, 1)).lower(*arguments)
    middle = time.perf_counter()
    with only_implementations(ONLY.get(mode)):
        program = lowered.compile()
    row = {
        "lower_s": middle - start,
        "compile_s": time.perf_counter() - middle,
        "temp_gib": program.memory_analysis().temp_size_in_bytes / 2**30,
    }
    return program, init, row


@contextlib.contextmanager
def only_implementations(names: tuple[str, ...] | None) -> Iterator[None]:
    """Leaves sites of attention no implementation but these."""
    table = binding.IMPLEMENTATIONS["hlo_tools.attention"]
    rows = {name: x for name, x in table.items() if names is None or name in names}
    with mock.patch.dict(table, rows, clear=True):
        binding.load_implementations.cache_clear()
        yield
    binding.load_implementations.cache_clear()


def losses_of(program, state, batches) -> list[float]:
    """Returns the loss of each step from `state`, which is used up."""
    losses = []
    for tokens in batches:
        *state, loss = program(*state, tokens)
        losses.append(loss)
    return [float(loss) for loss in losses]


def timed(programs: dict, state, batches, rounds: int) -> dict[str, list[float]]:
    """Times single steps, the modes in turn, on one state."""
    seconds: dict[str, list[float]] = {mode: [] for mode in programs}
    for number in range(rounds + 2):  # two rounds of warming up
        for mode, program in programs.items():
            tokens = jax.block_until_ready(batches[number % len(batches)])
            start = time.perf_counter()
            *state, loss = program(*state, tokens)
            loss.block_until_ready()
            if number >= 2:
                seconds[mode].append(time.perf_counter() - start)
    return seconds


def attempt(function, *arguments):
    """Returns (result, None), or (None, why) where memory ran out."""
    try:
        return jax.block_until_ready(function(*arguments)), None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, "out of memory"


def run_shape(module, batch: int, length: int, options) -> dict:
    """Runs all modes at one shape."""
    sizes = TINY if options.tiny else {}
    vocabulary = sizes.get("V", 32000)
    batches = [tokens_of(batch, length, vocabulary, n) for n in range(options.steps)]
    rows: dict[str, dict] = {}
    programs = {}
    for mode in options.modes.split(","):
        program, init, row = compiled(module, mode, batch, length, sizes)
        rows[mode] = row
        losses, why = attempt(losses_of, program, init(), batches)
        row.update({"error": why} if why else {"losses": losses})
        if why is None:
            programs[mode] = program
        print(batch, length, mode, {k: v for k, v in row.items() if k != "losses"},
              None if why else (losses[0], losses[-1]), flush=True)  # fmt: skip
        del program
        gc.collect()
    seconds = timed(programs, init(), batches, options.rounds)
    for mode, values in seconds.items():
        step = statistics.median(values)
        rows[mode].update(step_ms=step * 1e3, tokens_per_s=batch * length / step)
        rows[mode]["step_ms_spread"] = [min(values) * 1e3, max(values) * 1e3]
    result = {"batch": batch, "length": length, "modes": rows, **compared(rows)}
    print(json.dumps({k: v for k, v in result.items() if k != "modes"}), flush=True)
    return result


def compared(rows: dict) -> dict:
    """Returns the ratios that the goals are about."""
    found: dict = {}
    staged = rows["staged"]
    for other in ("cudnn", "bound_to_cudnn", "naive"):
        row = rows.get(other, {})
        if "step_ms" in row and "step_ms" in staged:
            found[f"speed_over_{other}"] = row["step_ms"] / staged["step_ms"]
        if "losses" in row and "losses" in staged:
            pairs = zip(staged["losses"], row["losses"], strict=True)
            found[f"largest_loss_difference_to_{other}"] = max(
                abs(a - b) for a, b in pairs
            )
        if "compile_s" in row:
            total = row["compile_s"] + row["lower_s"]
            ours = staged["compile_s"] + staged["lower_s"]
            found[f"compile_time_over_{other}"] = ours / total
    if "cudnn" in rows and "naive" in rows and "losses" in rows["naive"]:
        pairs = zip(rows["naive"]["losses"], rows["cudnn"]["losses"], strict=True)
        found["loss_difference_naive_to_cudnn"] = max(abs(a - b) for a, b in pairs)
    return found


def print_table(results: list[dict]) -> None:
    """Prints one line a shape and mode."""
    print(f"{'B':>3} {'S':>5} {'mode':<7} {'tok/s':>8} {'ms':>8} {'temp GiB':>8} "
          f"{'lower s':>7} {'compile s':>9} {'last loss':>9}")  # fmt: skip
    for result in results:
        for mode, row in result["modes"].items():
            speed = row.get("tokens_per_s")
            text = f"{speed:8.0f} {row['step_ms']:8.1f}" if speed else row["error"]
            last = f"{row['losses'][-1]:9.4f}" if "losses" in row else ""
            print(f"{result['batch']:>3} {result['length']:>5} {mode:<7} {text:<17} "
                  f"{row['temp_gib']:8.2f} {row['lower_s']:7.2f} "
                  f"{row['compile_s']:9.2f} {last}")  # fmt: skip


def main() -> None:
    """Runs the benchmark and writes results/train_llama_h200.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-file", type=Path, default=model_file())
    parser.add_argument("--shapes", default=SHAPES, help="BxS, joined by commas")
    parser.add_argument("--modes", default="naive,staged,cudnn")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tiny", action="store_true")
    default = ROOT / "benchmarks/results/train_llama_h200.json"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    if options.tiny:
        options.modes = "naive,staged"
    module = load(options.model_file)
    record = {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")
        },
        "steps": options.steps,
        "rounds": options.rounds,
        "results": [],
    }
    for shape in options.shapes.split(","):
        batch, length = map(int, shape.split("x"))
        record["results"].append(run_shape(module, batch, length, options))
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    print_table(record["results"])


if __name__ == "__main__":
    main()
