"""Scores the selector against raw measurements: predicted pick over best, by family.

    python benchmarks/score_selector.py TABLE.json... [--fit] [--output scores.json]

A table is what `hlo-tools tune` writes: every configuration that can run, and its
time. No device is needed. With --fit the constants of the Hopper attention model are
fitted to all times of the tables first, those of the losers included, and printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hlo_tools.errors import HloToolsError
from hlo_tools.targets import Target
from pallas_kernels import scoring
from pallas_kernels.attention import gpu_family
from pallas_kernels.attention.hopper_model import AT_MOST_ONE, default_constants
from pallas_kernels.families import load_family
from pallas_kernels.fitting import fit
from pallas_kernels.measured import MeasuredTable, load_table

FREE = {
    "attention-forward": (
        "tensor_efficiency", "overlap", "score_operations", "rescale_operations",
        "mask_operations", "tile_cycles", "cta_cycles", "load_cycles", "l2_efficiency",
        "memory_overlap", "tail",
    ),
    "attention-backward": (
        "tensor_efficiency", "overlap", "backward_score_operations",
        "mask_operations", "backward_tile_cycles", "cta_cycles", "load_cycles",
        "l2_efficiency", "memory_overlap", "tail",
    ),
}  # fmt: skip


def fit_constants(table: MeasuredTable) -> dict[str, float]:
    """Fits the model to a table, prints what changed, and returns the constants."""
    family, target = load_family(table.family), Target.parse(table.device_kind)
    samples = [
        (
            (family.problem_of(key), family.config_class.from_dict(one.config)),
            one.seconds,
        )
        for key, entry in table.entries.items()
        for one in entry.samples
        if one.seconds is not None
    ]

    def predict(what: tuple[Any, Any], constants: Mapping[str, float]) -> float:
        gpu_family.CONSTANTS.update(constants)
        return family.predict(*what, target).seconds

    start = default_constants()
    limits = {name: (0.05, 1.0) for name in AT_MOST_ONE}
    found = fit(predict, samples, start, FREE[table.family], limits)
    print(
        f"{table.family} on {table.device_kind}: {len(samples)} times, root mean square"
        f" of the log error {found.error:.3f}, worst {found.worst:.3f}"
    )
    for name in FREE[table.family]:
        print(f"  {name:28s} {start[name]:10.3f} -> {found.constants[name]:10.3f}")
    return found.constants


def main() -> int:
    """Prints the scores of each table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="+", help="files that hlo-tools tune wrote")
    parser.add_argument("--fit", action="store_true", help="fit the constants first")
    parser.add_argument("--output", help="where the scores go as JSON")
    options = parser.parse_args()
    results = {}
    for file in options.tables:
        try:
            table = load_table(Path(file))
            family, target = load_family(table.family), Target.parse(table.device_kind)
            gpu_family.CONSTANTS.update(
                fit_constants(table) if options.fit else default_constants()
            )
            scores = scoring.score(family, table, target)
        except HloToolsError as error:
            sys.exit(f"{file}: {error}")
        print(f"{table.family} on {table.device_kind}, {table.date}:")
        print(scoring.scores_text(scores, family.key), end="")
        results[file] = scoring.scores_dict(scores, family.key)
    if options.output:
        Path(options.output).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
