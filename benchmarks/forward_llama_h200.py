"""Forward pass of a 0.9B Llama-style model at (1, 8192): jit, staged jit, cuDNN.

The model's attention is spelled out with einsums ("naive") or calls
`jax.nn.dot_product_attention(implementation="cudnn")` ("cudnn"). Three modes,
logits to mean loss, no gradient:

    naive    the naive model under jax.jit
    staged   the same naive model under hlo_tools.jit
    cudnn    the hand-placed cuDNN model under jax.jit

First correctness: loss and logits of `staged` against both others, and at a shorter
length the error of every mode against a float32 run of the same parameters with
full-precision products. Then interleaved timing on fresh random tokens.

    python benchmarks/forward_llama_h200.py --model-file PATH [--tiny]

The model file is `baselines/train_llama_0.9b.py` of the shared folder:
$HLO_TOOLS_SHARED, or `../shared` beside the repository, or --model-file. `--tiny`
runs the same logic with a tiny model anywhere, without the cuDNN mode.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import statistics
import sys
import time
import types
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import hlo_tools

ROOT = Path(__file__).resolve().parents[1]
MODEL = "baselines/train_llama_0.9b.py"
# House rule: at most twice the error of the same-dtype program, against float32.
ERROR_RATIO = 2.0
GOAL_OVER_NAIVE, GOAL_OVER_CUDNN = 2.0, 1.03


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of model and inputs; the names are those of the model file."""

    B: int = 1
    S: int = 8192
    check_S: int = 2048
    V: int = 32000
    d: int = 2048
    L: int = 16
    h: int = 16
    hk: int = 8
    f: int = 5632

    def model(self) -> tuple[int, ...]:
        """Returns the model's constructor arguments up to `mode`."""
        return self.V, self.d, self.L, self.h, self.hk, self.f


TINY = Sizes(S=1024, check_S=256, V=256, d=128, L=2, h=4, hk=2, f=256)


def model_file() -> Path:
    """Returns where the model file is expected."""
    shared = os.environ.get("HLO_TOOLS_SHARED", ROOT.parent / "shared")
    return Path(shared) / MODEL


def load(path: Path, dtype: str = "bfloat16") -> types.ModuleType:
    """Executes the model file, its bfloat16 replaced by `dtype`.

    The file hard-codes its compute type; replacing the word gives the float32
    reference with the same structure and the same parameters.
    """
    source = path.read_text().replace("jnp.bfloat16", f"jnp.{dtype}")
    module = types.ModuleType(f"benchmark_model_{dtype}")
    # Under its name in the shared folder: the report names lines of that file.
    exec(compile(source, MODEL, "exec"), module.__dict__)
    return module


def forward(module: types.ModuleType, sizes: Sizes, mode: str):
    """Returns `(logits, loss)`: functions of (params, tokens [B, S+1])."""
    make = lambda: module.LM(*sizes.model(), mode, nnx.Rngs(0))  # noqa: E731
    graph, _ = nnx.split(nnx.eval_shape(make))

    def logits(params, tokens):
        return nnx.merge(graph, params)(tokens[:, :-1]).astype(jnp.float32)

    def loss(params, tokens):
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits(params, tokens), tokens[:, 1:]).mean()

    return logits, loss


def parameters(module: types.ModuleType, sizes: Sizes):
    """Returns freshly initialized parameters (float32, shared by all modes)."""
    make = lambda: nnx.split(module.LM(*sizes.model(), "naive", nnx.Rngs(0)))[1]  # noqa: E731
    return jax.block_until_ready(jax.jit(make)())


def random_tokens(sizes: Sizes, length: int, seed: int) -> jax.Array:
    """Returns fresh tokens [B, length + 1]."""
    key = jax.random.key(seed)
    return jax.random.randint(key, (sizes.B, length + 1), 0, sizes.V)


def errors(got, reference) -> dict[str, float]:
    """Returns the largest and the root-mean-square difference of two arrays."""
    delta = got.astype(jnp.float32) - reference.astype(jnp.float32)
    return {
        "max": float(jnp.abs(delta).max()),
        "rms": float(jnp.sqrt(jnp.square(delta).mean())),
    }


def check_against_float32(path: Path, modes: dict, params, sizes: Sizes) -> dict:
    """Compares the logits of every mode with a float32 run at `check_S`.

    Returns:
        mode -> error, and "passed": the staged error is within `ERROR_RATIO` of
        the naive program's own.
    """
    tokens = random_tokens(sizes, sizes.check_S, seed=1)
    reference_logits, _ = forward(load(path, "float32"), sizes, "naive")
    with jax.default_matmul_precision("highest"):
        reference = jax.jit(reference_logits)(params, tokens)
    result = {
        name: errors(jit(logits)(params, tokens), reference)
        for name, (jit, logits, _) in modes.items()
    }
    limits = [ERROR_RATIO * result["naive"][key] for key in ("max", "rms")]
    staged = [result["staged"][key] for key in ("max", "rms")]
    passed = all(s <= limit for s, limit in zip(staged, limits, strict=True))
    return {"S": sizes.check_S, "logits": result, "passed": passed}


def check_at_length(modes: dict, params, sizes: Sizes) -> dict:
    """Compares loss and logits of the staged mode with the others' at full length."""
    tokens = random_tokens(sizes, sizes.S, seed=2)
    losses = {
        n: float(jit(loss)(params, tokens)) for n, (jit, _, loss) in modes.items()
    }
    stage, staged_logits, _ = modes["staged"]
    staged = stage(staged_logits)(params, tokens)
    result = {}
    for name, (jit, logits, _) in modes.items():
        if name != "staged":
            result[name] = errors(staged, jit(logits)(params, tokens))
    return {"S": sizes.S, "loss": losses, "staged_logits_against": result}


def compile_modes(modes: dict, params, sizes: Sizes) -> tuple[dict, dict, object]:
    """Compiles the loss of every mode.

    Returns:
        (mode -> executable, mode -> facts, the stage's report).
    """
    tokens, executables, facts = random_tokens(sizes, sizes.S, seed=3), {}, {}
    report = None
    for name, (jit, _, loss) in modes.items():
        start = time.perf_counter()
        fn = jit(loss)
        executables[name] = fn.lower(params, tokens).compile()
        seconds = time.perf_counter() - start
        memory = executables[name].memory_analysis()
        facts[name] = {
            "lower_and_compile_seconds": seconds,
            "temp_bytes": memory.temp_size_in_bytes,
        }
        if name == "staged":
            report = fn.report()
    return executables, facts, report


def time_modes(executables: dict, params, sizes: Sizes, rounds: int) -> dict:
    """Times every executable once a round, on tokens new to each round.

    Returns:
        mode -> all its seconds, warm-up left out.
    """
    times = {name: [] for name in executables}
    for index in range(rounds + 3):
        tokens = jax.block_until_ready(random_tokens(sizes, sizes.S, seed=100 + index))
        for name, executable in executables.items():
            start = time.perf_counter()
            executable(params, tokens).block_until_ready()
            elapsed = time.perf_counter() - start
            if index >= 3:  # the first rounds warm up
                times[name].append(elapsed)
    return times


def summarize(times: dict, facts: dict, sizes: Sizes) -> dict:
    """Returns medians, spread, throughput and ratios of the timed modes."""
    rows = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rows[name] = facts[name] | {
            "median_ms": median * 1e3,
            "min_ms": min(seconds) * 1e3,
            "max_ms": max(seconds) * 1e3,
            "runs": len(seconds),
            "tokens_per_second": sizes.B * sizes.S / median,
        }
    ratios = {
        f"{name}_over_staged": rows[name]["median_ms"] / rows["staged"]["median_ms"]
        for name in rows
        if name != "staged"
    }
    goals = {"naive_2x": ratios["naive_over_staged"] >= GOAL_OVER_NAIVE}
    if "cudnn" in rows:
        goals["cudnn_3%"] = ratios["cudnn_over_staged"] >= 1 / GOAL_OVER_CUDNN
    return {"modes": rows, "ratios": ratios, "goals": goals}


def show(result: dict) -> None:
    """Prints the tables."""
    short, full = result["float32_check"], result["full_length_check"]
    print(f"\nlogits against float32, S = {short['S']}:")
    for name, error in short["logits"].items():
        print(f"  {name:<7} max {error['max']:.3e}  rms {error['rms']:.3e}")
    print(f"  staged within {ERROR_RATIO:g}x of naive: {short['passed']}")
    print(f"\nS = {full['S']}: loss", end="")
    print("".join(f"  {name} {loss:.6f}" for name, loss in full["loss"].items()))
    for name, error in full["staged_logits_against"].items():
        print(f"  staged - {name}: max {error['max']:.3e}  rms {error['rms']:.3e}")
    header = f"{'mode':<7} {'median ms':>10} {'min':>8} {'max':>8} {'tok/s':>9}"
    print(f"\n{header} {'temp GiB':>9} {'compile s':>10}")
    for name, row in result["modes"].items():
        print(
            f"{name:<7} {row['median_ms']:>10.2f} {row['min_ms']:>8.2f}"
            f" {row['max_ms']:>8.2f} {row['tokens_per_second']:>9.0f}"
            f" {row['temp_bytes'] / 2**30:>9.3f}"
            f" {row['lower_and_compile_seconds']:>10.2f}"
        )
    for name, ratio in result["ratios"].items():
        print(f"{name}: {ratio:.3f}")
    print("goals:", ", ".join(f"{k} {v}" for k, v in result["goals"].items()))


def environment(sizes: Sizes) -> dict:
    """Returns what the numbers depend on: date, versions, device, command."""
    names = ("jax", "jaxlib", "flax", "optax")
    device = jax.devices()[0]
    arguments = [Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:]]
    command = ["python", "benchmarks/forward_llama_h200.py", *arguments]
    return {
        "command": " ".join(command),
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "platform_version": device.client.platform_version,
        "device": device.device_kind,
        "sizes": dataclasses.asdict(sizes),
    }


def results_folder() -> Path:
    """Returns $OUT if it is set, else benchmarks/results."""
    return Path(os.environ.get("OUT", ROOT / "benchmarks" / "results"))


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and writes its JSON.

    Returns:
        0 if the staged logits are right, 1 if not, 2 if the model file is missing.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-file", type=Path, default=model_file())
    parser.add_argument("--rounds", type=int, default=20, help="timed runs per mode")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, no cuDNN")
    args = parser.parse_args(argv)
    if not args.model_file.is_file():
        print(f"no model file at {args.model_file}: give --model-file", file=sys.stderr)
        return 2
    sizes = TINY if args.tiny else Sizes()
    module = load(args.model_file)
    plan = [("naive", jax.jit, "naive"), ("staged", hlo_tools.jit, "naive")]
    plan += [] if args.tiny else [("cudnn", jax.jit, "cudnn")]
    modes = {name: (jit, *forward(module, sizes, mode)) for name, jit, mode in plan}
    params = parameters(module, sizes)
    result = environment(sizes)
    print(f"{result['device']}, jax {result['versions']['jax']}, {sizes}", flush=True)
    # First, while nothing is in JAX's caches, so that compile times are true.
    executables, facts, report = compile_modes(modes, params, sizes)
    result["float32_check"] = check_against_float32(
        args.model_file, modes, params, sizes
    )
    result["full_length_check"] = check_at_length(modes, params, sizes)
    times = time_modes(executables, params, sizes, args.rounds)
    result |= summarize(times, facts, sizes)
    result["report"] = report.to_dict()
    show(result)
    print("\n" + report.text())
    name = "forward_llama_tiny.json" if args.tiny else "forward_llama_h200.json"
    path = results_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)
    return 0 if result["float32_check"]["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
