"""Train a small Llama-style model twice: under `jax.jit` and under `hlo_tools.jit`.

The model is a Flax NNX language model over bytes whose attention is spelled out
with einsums, the way people write it by hand. `train_step` and `eval_step` know
nothing of hlo_tools; only the function that jits them differs. The script

1. trains both from the same start and compares the losses step by step,
2. measures step time and temporary memory over sequence lengths,
3. prints what the stage did, and to which source lines.

It exits with 1 if the losses disagree by more than the stated tolerance.

    python examples/01_train_step.py [--seq 256] [--steps 20] [--quick]
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import track

import hlo_tools

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 256, 128, 2, 4, 2, 32, 384
# Float32 runs that sum in another order differ by about 1e-7 relative in one step;
# AdamW then divides by the root of small second moments and so amplifies that.
LOSS_TOLERANCE = 1e-4


# --- the model and its steps: plain Flax, JAX and Optax -------------------------------


def rope(x, cos, sin):
    """Rotates the two halves of each head, x [B, S, H, D], by its position."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    """Causal grouped-query attention, spelled out."""

    def __init__(self, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.q = linear(DIM, HEADS * HEAD_DIM)
        self.k = linear(DIM, KV_HEADS * HEAD_DIM)
        self.v = linear(DIM, KV_HEADS * HEAD_DIM)
        self.o = linear(HEADS * HEAD_DIM, DIM)

    def __call__(self, x, cos, sin):
        batch, seq, _ = x.shape
        q = rope(self.q(x).reshape(batch, seq, HEADS, HEAD_DIM), cos, sin)
        k = rope(self.k(x).reshape(batch, seq, KV_HEADS, HEAD_DIM), cos, sin)
        v = self.v(x).reshape(batch, seq, KV_HEADS, HEAD_DIM)
        k = jnp.repeat(k, HEADS // KV_HEADS, axis=2)  # [B, S, H, D]
        v = jnp.repeat(v, HEADS // KV_HEADS, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(HEAD_DIM)
        mask = jnp.tril(jnp.ones((seq, seq), bool))
        scores = jnp.where(mask, scores.astype(jnp.float32), -1e30)
        probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs, v)
        return self.o(out.reshape(batch, seq, -1))


class SwiGLU(nnx.Module):
    """The gated feed-forward layer of Llama."""

    def __init__(self, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate, self.up = linear(DIM, HIDDEN), linear(DIM, HIDDEN)
        self.down = linear(HIDDEN, DIM)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (nnx.RMSNorm(DIM, rngs=rngs) for _ in range(2))
        self.attention, self.mlp = Attention(rngs), SwiGLU(rngs)

    def __call__(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nnx.Module):
    """Bytes in, next-byte logits out."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        half = HEAD_DIM // 2
        angles = jnp.arange(tokens.shape[1])[:, None] * 1e4 ** (
            -jnp.arange(half) / half
        )
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


GRAPH, INITIAL_PARAMS = nnx.split(LanguageModel(nnx.Rngs(0)))
OPTIMIZER = optax.adamw(3e-3)


def loss_fn(params, tokens):
    """Mean next-byte cross-entropy of tokens [B, S+1]."""
    logits = nnx.merge(GRAPH, params)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(params, opt_state, tokens):
    """One AdamW step -> (params, opt_state, loss before the step)."""
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def eval_step(params, tokens):
    """The forward pass alone -> loss."""
    return loss_fn(params, tokens)


# --- the comparison -------------------------------------------------------------------

JITS = {"jax.jit": jax.jit, "hlo_tools.jit": hlo_tools.jit}


def load_text() -> np.ndarray:
    """Returns Python's own help topics, real English text, as bytes."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), np.uint8)


def sample(text: np.ndarray, batch: int, seq: int, seed: int) -> jax.Array:
    """Returns `batch` random windows of the text, [batch, seq + 1] int32."""
    starts = np.random.default_rng(seed).integers(0, len(text) - seq - 1, batch)
    return jnp.asarray(np.stack([text[s : s + seq + 1] for s in starts]), jnp.int32)


def fresh_state():
    """Returns new copies of the initial (params, opt_state): steps donate theirs."""
    params = jax.tree.map(jnp.copy, INITIAL_PARAMS)
    return params, OPTIMIZER.init(params)


def compare_losses(text: np.ndarray, batch: int, seq: int, steps: int) -> float:
    """Trains under both jits from one start and prints both loss columns.

    Returns:
        The largest absolute difference of the two losses over all steps.
    """
    runs: dict = {
        name: (jit(train_step, donate_argnums=(0, 1)), fresh_state())
        for name, jit in JITS.items()
    }
    print(f"\n1. Losses, batch {batch}, S = {seq}, AdamW\n")
    print(f"{'step':>4} {'jax.jit':>12} {'hlo_tools.jit':>14} {'difference':>11}")
    worst = 0.0
    for step in range(steps):
        tokens, losses = sample(text, batch, seq, step), []
        for name, (fn, state) in runs.items():
            *state, loss = fn(*state, tokens)
            runs[name] = fn, state
            losses.append(float(loss))
        difference = abs(losses[0] - losses[1])
        worst = max(worst, difference) if np.isfinite(difference) else float("inf")
        row = f"{step:>4} {losses[0]:>12.6f} {losses[1]:>14.6f} {difference:>11.1e}"
        print(row, flush=True)
    print(f"\nmax difference {worst:.1e}, tolerance {LOSS_TOLERANCE:.0e}", end=": ")
    print("agree" if worst <= LOSS_TOLERANCE else "DISAGREE")
    return worst


def seconds(run) -> float:
    """Returns the wall time of one call, its result computed to the end."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def interleaved_medians(runs: dict, rounds: int) -> dict[str, float]:
    """Times every run once a round, so that drift of the machine hits all alike."""
    times = {name: [] for name in runs}
    for round_index in range(rounds + 1):
        for name, run in runs.items():
            elapsed = seconds(run)
            if round_index:  # round 0 warms up
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def train_runner(compiled, tokens):
    """Returns a thunk that advances its own state by one step at each call."""
    state = list(fresh_state())

    def run():
        state[0], state[1], loss = compiled(*state, tokens)
        return loss

    return run


def measure(kind: str, text: np.ndarray, seq: int, rounds: int) -> tuple[dict, object]:
    """Compiles and times one step under both jits, batch 1.

    Args:
        kind: "train" or "eval".
        text: the bytes to draw tokens from.
        seq: sequence length S.
        rounds: interleaved timing rounds.

    Returns:
        (row, report): the row has `ms` and `temp` (MiB) per jit, and `bound`.
    """
    tokens, runs, temp = sample(text, 1, seq, seq), {}, {}
    params, opt_state = fresh_state()
    for name, jit in JITS.items():
        if kind == "train":
            fn = jit(train_step, donate_argnums=(0, 1))
            compiled = fn.lower(params, opt_state, tokens).compile()
            runs[name] = train_runner(compiled, tokens)
        else:
            fn = jit(eval_step)
            compiled = fn.lower(params, tokens).compile()
            runs[name] = functools.partial(compiled, params, tokens)
        temp[name] = compiled.memory_analysis().temp_size_in_bytes / 2**20
    medians = interleaved_medians(runs, rounds)
    report = fn.report()  # the last of JITS is hlo_tools.jit
    row = {
        "kind": kind,
        "seq": seq,
        "bound": len(report.with_status("bound")),
        "ms": {name: median * 1e3 for name, median in medians.items()},
        "temp": temp,
    }
    return row, report


def print_row(row: dict) -> None:
    """Prints one line of the table."""
    (plain_ms, ms), (plain_temp, temp) = row["ms"].values(), row["temp"].values()
    faster, smaller = f"{plain_ms / ms:.2f}x", f"{plain_temp / max(temp, 1e-9):.2f}x"
    if not row["bound"]:  # one program, timed twice: a ratio would be noise
        faster = smaller = "same"
    print(
        f"{row['kind']:>5} {row['seq']:>5} {row['bound']:>5} {plain_ms:>10.1f}"
        f" {ms:>10.1f} {faster:>8} {plain_temp:>11.1f} {temp:>11.1f} {smaller:>8}",
        flush=True,
    )


def table(text: np.ndarray, lengths: list[int], rounds: int) -> tuple[list, dict]:
    """Measures and prints all lengths; returns rows and the last report per kind."""
    print("\n2. Step time and temporary memory, batch 1 (plain = jax.jit)\n")
    print(
        f"{'step':>5} {'S':>5} {'bound':>5} {'plain ms':>10} {'staged ms':>10}"
        f" {'faster':>8} {'plain MiB':>11} {'staged MiB':>11} {'smaller':>8}"
    )
    rows, reports = [], {}
    cases = [(kind, seq) for kind in ("train", "eval") for seq in lengths]
    console = Console(stderr=True)
    for kind, seq in track(cases, "measuring", console=console, transient=True):
        row, reports[kind] = measure(kind, text, seq, rounds)
        rows.append(row)
        print_row(row)
    return rows, reports


def conclude(rows: list[dict], reports: dict) -> None:
    """Says in words what the numbers of the longest sequence show."""
    for kind, report in reports.items():
        row = [r for r in rows if r["kind"] == kind][-1]
        (plain_ms, ms), (plain_temp, temp) = row["ms"].values(), row["temp"].values()
        where = f"{kind} step at S = {row['seq']}"
        if not row["bound"]:
            print(f"{where}: no site bound, so both jits run the same program.")
            for reason in dict.fromkeys(site.reason for site in report.sites):
                print(f"  {reason}")
            continue
        print(
            f"{where}: {row['bound']} sites bound; {ms / plain_ms:.2f}x the time and"
            f" {temp / max(plain_temp, 1e-9):.2f}x the temporary memory of jax.jit."
        )
        print(f"  {report.summary_line()}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=256, help="S of the loss comparison")
    parser.add_argument("--steps", type=int, default=20, help="training steps compared")
    parser.add_argument("--batch", type=int, default=4, help="batch of the comparison")
    parser.add_argument("--rounds", type=int, default=5, help="timing rounds")
    parser.add_argument("--quick", action="store_true", help="smallest sizes")
    args = parser.parse_args(argv)
    if args.quick:
        args.seq, args.steps, args.batch, args.rounds = 64, 3, 2, 1
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison.

    Returns:
        0 if the losses agree within `LOSS_TOLERANCE`, else 1.
    """
    args = parse(argv)
    text = load_text()
    size = sum(x.size for x in jax.tree.leaves(INITIAL_PARAMS))
    print(f"{size:,} parameters, {len(text):,} bytes of text, {jax.devices()[0]}")
    worst = compare_losses(text, args.batch, args.seq, args.steps)
    lengths = [256] if args.quick else [128, 256, 512, 1024, 2048]
    rows, reports = table(text, lengths, args.rounds)
    print()
    conclude(rows, reports)
    for number, (kind, report) in enumerate(reports.items(), start=3):
        print(f"\n{number}. Report of the {kind} step at S = {lengths[-1]}\n")
        print(report.text())
    return 0 if worst <= LOSS_TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
