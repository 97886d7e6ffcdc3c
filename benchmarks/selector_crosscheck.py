"""Compares the selector's picks with the best configurations that Tokamax stores.

Tokamax ships the tiles that were fastest on an H100 for its own Hopper attention
kernels. Their times are not stored for the others, so what can be compared offline is
the choice: in the space of their tuner, does the model of pallas_kernels pick the
same (block_q, block_kv, stages), and where does it rank theirs?

    python benchmarks/selector_crosscheck.py [--wheel tokamax.whl] [--fit]

The constants were settled while looking at the 72 shapes of FlashAttention-3's
benchmarks ("paper"), so only the other rows are unseen data.

The data is read from an installed tokamax, or from a wheel. With --fit the model's
constants are first fitted to the stored times, to see how much of a miss is theirs.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import re
import statistics
import sys
import time
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from hlo_tools.targets import Target
from pallas_kernels.attention import hopper_attention as work
from pallas_kernels.attention.hopper_model import (
    AT_MOST_ONE,
    MOST_REGISTERS,
    add_predictions,
    default_constants,
)
from pallas_kernels.attention.problem import AttentionProblem
from pallas_kernels.fitting import fit

H100 = Target.parse("h100")
FOLDER = "tokamax/data/autotuning/nvidia_h100_80gb_hbm3"
KINDS = {
    "forward": "pallas_mosaic_gpu_flash_attention.json",
    "backward": "pallas_mosaic_gpu_flash_attention_vjp.json",
}
RESULTS = Path(__file__).with_name("results") / "selector_crosscheck.json"
DTYPES = {"bf16": "bfloat16", "f16": "float16"}
SMEM = 227 * 1024
THEIRS = ("stored", "rule", "measured_s", "predicted_s", "predicted_loss")
Choice = tuple[int, ...]  # block_q of a warpgroup, block_kv, stages[, warpgroups]


@dataclass(frozen=True)
class Row:
    """One stored problem: its choices, and the seconds of each, best first."""

    problem: AttentionProblem
    stored: tuple[tuple[Choice, float], ...]
    paper: bool  # one of the 72 shapes of FlashAttention-3's benchmarks


def read_tables(wheel: str | None) -> dict[str, dict]:
    """Reads the stored tables from a wheel or the installed package."""
    if wheel is not None:
        archive = zipfile.ZipFile(wheel)
        return {k: json.loads(archive.read(f"{FOLDER}/{f}")) for k, f in KINDS.items()}
    found = importlib.util.find_spec("tokamax")
    if found is None or not found.submodule_search_locations:
        sys.exit("tokamax is not installed: give --wheel FILE")
    root = Path(next(iter(found.submodule_search_locations))).parent
    return {k: json.loads((root / FOLDER / f).read_text()) for k, f in KINDS.items()}


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Splits "bf16[2,3]" into a dtype and sizes."""
    match = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    if match is None:
        raise ValueError(f"no shape: {text}")
    return match[1], tuple(int(size) for size in match[2].split(",") if size)


def parse_problem(key: str) -> AttentionProblem:
    """Returns the problem of a stored key.

    Raises:
      ValueError: it has a part that an `AttentionProblem` has no field for.
    """
    values = json.loads(key)
    shapes = {name: parse_shape(values[name]) for name in ("q", "k", "v")}
    if any(len(sizes) != 4 for _, sizes in shapes.values()):
        raise ValueError("not of rank 4")
    dtype, (batch, q_len, heads, depth) = shapes["q"]
    _, (_, k_len, kv_heads, _) = shapes["k"]
    mask = values["mask"] or {}
    causal = mask.get("causal_mask")
    others = ("q_start", "q_end", "k_start", "k_end")
    if any(mask.get(name) for name in others) or (causal or {}).get("window_size"):
        raise ValueError("a mask of another form")
    if any(values.get(name) for name in ("dropout_mask", "paging_info", "q_indices")):
        raise ValueError("dropout or pages")
    bias = parse_shape(values["bias"]) if values["bias"] else (None, None)
    bool_mask = mask.get("bool_mask")
    return AttentionProblem(
        batch, q_len, k_len, heads, kv_heads, depth, shapes["v"][1][3], DTYPES[dtype],
        scale=values["logits_scale"],
        softcap=values["logits_soft_cap"],
        causal=causal is not None,
        offset=causal["offset"] if causal else 0,
        bias=bias[1],  # type: ignore[arg-type]
        bias_dtype=DTYPES.get(bias[0], bias[0]) if bias[0] else None,
        mask=parse_shape(bool_mask)[1] if bool_mask else None,  # type: ignore
    )  # fmt: skip


def choice_of(kind: str, config: dict) -> Choice:
    """Returns what is compared of a stored configuration."""
    if kind == "forward":
        return config["block_q"], config["block_kv"], config["num_stages"]
    assert config["block_q_dkv"] == config["block_q_dq"]
    assert config["block_kv_dkv"] == config["block_kv_dq"]
    blocks = config["block_q_dkv"], config["block_kv_dkv"]
    return *blocks, config["num_stages"], config["compute_wgs"]


def is_paper_shape(problem: AttentionProblem) -> bool:
    """16 K tokens, 2048 wide, nothing but a causal mask."""
    return (
        problem.batch * problem.q_len == 16384
        and problem.heads * problem.head_dim == 2048
        and problem.head_dim in (64, 128, 256)
        and problem.q_len >= 512
        and problem.bias is None
        and problem.mask is None
    )


def read_rows(kind: str, table: dict) -> tuple[list[Row], dict[str, int]]:
    """Returns the rows that can be read, one a problem, and why others can not."""
    rows: dict[AttentionProblem, Row] = {}
    skipped: dict[str, int] = defaultdict(int)
    for key, configs in table.items():
        if json.loads(key).get("return_residuals"):
            skipped["the same problem with residuals"] += 1
            continue
        try:
            problem = parse_problem(key)
        except ValueError as error:
            skipped[str(error)] += 1
            continue
        stored = [
            (
                choice_of(kind, json.loads(config)),
                statistics.median(found["evaluation_times_ms"]) / 1e3,
            )
            for config, found in configs.items()
        ]
        stored.sort(key=lambda pair: pair[1])
        if problem in rows:
            skipped["the same problem in another spelling"] += 1
            continue
        rows[problem] = Row(problem, tuple(stored), is_paper_shape(problem))
    return list(rows.values()), dict(skipped)


@functools.cache
def space(kind: str, problem: AttentionProblem) -> list[Choice]:
    """The configurations of tokamax's tuner that fit, fewest stages first."""
    found: list[Choice] = []
    if kind == "forward":
        for stages, rows, keys in itertools.product(
            (2, 3, 4), (64, 128), (128, 64, 256)
        ):
            smem = work.forward_smem(problem, 2 * rows, keys, stages)
            registers = work.forward_registers(problem, rows, keys, keep_probs=False)
            fits = smem <= SMEM and registers <= MOST_REGISTERS[2]
            few = rows == 128 and problem.q_len <= 128
            if fits and not few and stages <= max(-(-problem.k_len // keys), 2):
                found.append((rows, keys, stages))
        return found
    for stages, groups, rows, keys in itertools.product(
        (2, 3), (2, 1), (64, 128), (64, 128)
    ):
        smem = max(
            work.dkv_smem(problem, rows, keys * groups, stages, has_dq=False),
            work.dq_smem(problem, rows * groups, keys, stages),
        )
        if smem <= SMEM:
            found.append((rows, keys, stages, groups))
    return found


def fixed_rule(kind: str, problem: AttentionProblem) -> Choice:
    """What tokamax takes on an sm90 GPU of which it has no times."""
    if kind == "backward" or work.forward_smem(problem, 128, 128, 2) >= SMEM:
        return 64, 64, 2
    return 64, 128, 2


def predict(kind: str, problem: AttentionProblem, choice: Choice, constants) -> float:
    """Returns the predicted seconds of tokamax's kernels on an H100."""
    rows, keys, stages = choice[:3]
    if kind == "forward":
        return work.forward_prediction(
            problem, 2 * rows, keys, stages, 2, H100, constants
        ).seconds
    groups = choice[3]
    dkv, dq = (rows, keys * groups), (rows * groups, keys)
    kept = ("dk", "dv"), ("dq",)
    over = [
        max(0, work.backward_registers(problem, *blocks, groups, names) - 240)
        for blocks, names in zip((dkv, dq), kept, strict=True)
    ]
    tail = stages, groups, H100, constants
    return add_predictions(
        work.dkv_prediction(problem, *dkv, *tail, has_dq=False, spilled=over[0]),
        work.dq_prediction(problem, *dq, *tail, spilled=over[1]),
        work.delta_prediction(problem, H100, constants),
        work.group_prediction(problem, H100, constants),
    ).seconds


def compare(kind: str, rows: list[Row], constants) -> list[dict]:
    """Returns, for each row, our pick, and where theirs ranks in our order."""
    found = []
    for row in rows:
        choices = space(kind, row.problem)
        started = time.perf_counter()
        seconds = {c: predict(kind, row.problem, c, constants) for c in choices}
        order = sorted(choices, key=seconds.__getitem__)
        took = time.perf_counter() - started
        best = {choice[:3] for choice, _ in row.stored[:1]}
        theirs, measured = row.stored[0]
        rank = order.index(theirs) + 1 if theirs in order else None
        found.append({
            "problem": {
                "batch": row.problem.batch, "q_len": row.problem.q_len,
                "heads": row.problem.heads, "head_dim": row.problem.head_dim,
                "dtype": row.problem.dtype, "causal": row.problem.causal,
                "bias": row.problem.bias is not None,
            },
            "paper": row.paper,
            "stored": theirs, "ours": order[0], "rank": rank, "of": len(order),
            "hit": order[0][:3] in best,
            "rule": fixed_rule(kind, row.problem),
            "rule_hit": fixed_rule(kind, row.problem) in best,
            "predicted_loss": seconds[theirs] / seconds[order[0]] - 1
            if theirs in seconds else None,
            "predicted_s": predict(kind, row.problem, theirs, constants),
            "measured_s": measured, "select_ms": took * 1e3,
        })  # fmt: skip
    return found


def summary(rows: list[dict]) -> dict:
    """Returns hits and ranks of some compared rows."""
    ranks = [row["rank"] for row in rows if row["rank"] is not None]
    ratios = [row["predicted_s"] / row["measured_s"] for row in rows]
    losses = [
        row["predicted_loss"] for row in rows if row["predicted_loss"] is not None
    ]
    return {
        "problems": len(rows),
        "hits": sum(row["hit"] for row in rows),
        "rule_hits": sum(row["rule_hit"] for row in rows),
        "tiles_hit": sum(row["ours"][:2] == row["stored"][:2] for row in rows),
        "rule_tiles_hit": sum(row["rule"][:2] == row["stored"][:2] for row in rows),
        "mean_rank": statistics.mean(ranks) if ranks else None,
        "rank_at_most_3": sum(rank <= 3 for rank in ranks),
        "not_in_space": len(rows) - len(ranks),
        "largest_predicted_loss": max(losses, default=None),
        "predicted_over_measured": statistics.geometric_mean(ratios),
    }


def fitted_constants(kind: str, rows: list[Row], constants: dict) -> dict:
    """Returns the constants that fit the stored times of the best choices."""
    free = [
        "tensor_efficiency", "overlap", "score_operations", "mask_operations",
        "tile_cycles", "cta_cycles", "l2_efficiency", "tail", "rescale_operations",
    ]  # fmt: skip
    if kind == "backward":
        free += ["backward_score_operations", "backward_tile_cycles"]
    samples = [((row.problem, *row.stored[0]), row.stored[0][1]) for row in rows]
    found = fit(
        lambda what, values: predict(kind, what[0], what[1], values),
        samples, constants, free,
        limits={name: (0.05, 1.0) for name in AT_MOST_ONE},
        rounds=25,
    )  # fmt: skip
    print(f"{kind}: fitted, error {found.error:.3f}, worst {found.worst:.3f}")
    for name in free:
        print(f"  {name:28s} {constants[name]:9.3f} -> {found.constants[name]:9.3f}")
    return found.constants


def main() -> int:
    """Prints the comparison and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", help="a tokamax wheel, if it is not installed")
    parser.add_argument("--fit", action="store_true", help="fit the constants first")
    parser.add_argument("--output", default=str(RESULTS))
    options = parser.parse_args()
    results: dict = {"source": FOLDER, "fitted": options.fit}
    for kind, table in read_tables(options.wheel).items():
        rows, skipped = read_rows(kind, table)
        constants = default_constants()
        if options.fit:
            paper = [row for row in rows if row.paper]
            constants = fitted_constants(kind, paper, constants)
        compared = compare(kind, rows, constants)
        groups = {"all": compared, "paper": [row for row in compared if row["paper"]]}
        groups["others"] = [row for row in compared if not row["paper"]]
        for depth in (64, 128, 256):
            groups[f"paper D{depth}"] = [
                row for row in groups["paper"] if row["problem"]["head_dim"] == depth
            ]
        totals = {name: summary(rows) for name, rows in groups.items() if rows}
        # what is tokamax's own, its choices and times, stays out of the file
        ours = [
            {key: value for key, value in row.items() if key not in THEIRS}
            for row in compared
        ]
        results[kind] = {"skipped": skipped, "summary": totals, "rows": ours}
        print(f"{kind}: {len(compared)} problems; skipped {skipped}")
        for name, total in totals.items():
            print(
                f"  {name:11s} hits {total['hits']}/{total['problems']}"
                f" (fixed rule {total['rule_hits']}),"
                f" tiles {total['tiles_hit']} (rule {total['rule_tiles_hit']}),"
                f" mean rank {total['mean_rank']:.2f}, top 3 {total['rank_at_most_3']},"
                f" predicted/measured {total['predicted_over_measured']:.2f}"
            )
    Path(options.output).write_text(json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
