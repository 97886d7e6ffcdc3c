"""Fuzzed attention programs: whatever the passes do, the results stay equal.

Draws programs that hold attention in some spelling, or something that only looks
like it, runs the default pipeline with everything bound that can be bound, and
compares values and gradients with the original program. The cases and the checks are
those of `tests/fuzz_*.py`.

    python benchmarks/fuzz_attention.py --programs 10000 --seed 0 [--seconds 3600]
    python benchmarks/fuzz_attention.py --case "Case(q_len=4, softmax='late')"

Prints a table, writes benchmarks/results/fuzz_attention.json, and prints for a wrong
program its Case, the simplest Case that is wrong too, and a script that shows it.
Exits with 1 if any program is wrong.
"""

import argparse
import collections
import concurrent.futures
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import fuzz_case
import fuzz_check
import fuzz_reproducer
from fuzz_case import Case

import hlo_tools.binding

RESULTS = Path(__file__).parent / "results" / "fuzz_attention.json"
CHUNK = 20  # programs that a worker takes at a time
CHUNKS_PER_PROCESS = 20  # JAX keeps what it traced; a fresh process forgets it


@dataclass
class Outcome:
    """What the table needs of one program; travels between processes."""

    number: int
    case: Case
    wrong: str
    statuses: list[str]
    reasons: list[str]
    seconds: float
    compiled: bool


@dataclass
class Totals:
    """The sums over all programs so far."""

    programs: collections.Counter = field(default_factory=collections.Counter)
    sites: collections.Counter = field(default_factory=collections.Counter)
    near_misses: collections.Counter = field(default_factory=collections.Counter)
    modes: collections.Counter = field(default_factory=collections.Counter)
    wrong: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        case = outcome.case
        kind = "gradient" if case.differentiated else "forward"
        group = f"{kind}, {'near miss' if case.mutated else 'attention'}"
        self.programs[group] += 1
        bound = "bound" in outcome.statuses
        found = bound or "inlined" in outcome.statuses
        self.programs[f"{group}, something bound"] += bound
        self.programs[f"{group}, something outlined"] += found
        self.programs["compiled by XLA"] += outcome.compiled
        self.modes[case.mode] += 1
        for status in outcome.statuses:
            self.sites[f"{group}: {status}"] += 1
        for reason in outcome.reasons:
            self.near_misses[re.sub(r"-?\d[\d.e+-]*", "N", reason)[:90]] += 1
        self.seconds += outcome.seconds
        if outcome.wrong:
            self.wrong.append(outcome)

    @property
    def count(self) -> int:
        return sum(self.modes.values())


def check_case(number: int, case: Case) -> Outcome:
    """Checks one case; a fault of the builder itself counts as wrong too."""
    hlo_tools.binding.FASTER = float("inf")  # bind whatever the cost model says
    try:
        verdict = fuzz_check.check(case)
    except Exception as error:
        return Outcome(number, case, f"the suite raised {error!r}", [], [], 0.0, False)
    return Outcome(
        number,
        case,
        verdict.wrong,
        verdict.statuses,
        verdict.reasons,
        verdict.seconds,
        verdict.compiled,
    )


def check_numbers(seed: int, numbers: range) -> list[Outcome]:
    """Checks the cases of some numbers of a run."""
    return [check_case(n, fuzz_case.random_case(seed, n)) for n in numbers]


def new_pool(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        max_tasks_per_child=CHUNKS_PER_PROCESS,
    )


def check_one_by_one(seed: int, numbers: range) -> list[Outcome]:
    """Checks cases of which one ends its process, each in a process of its own."""
    found = []
    for number in numbers:
        with new_pool(1) as pool:
            future = pool.submit(check_numbers, seed, range(number, number + 1))
            try:
                found += future.result()
            except BrokenProcessPool:
                case = fuzz_case.random_case(seed, number)
                died = "the process died"
                found.append(Outcome(number, case, died, [], [], 0.0, False))
    return found


def run(seed: int, programs: int, seconds: float, workers: int) -> Totals:
    """Checks programs until there are enough, or the time is over."""
    totals, start = Totals(), time.monotonic()
    waiting = [
        range(first, min(first + CHUNK, programs))
        for first in range(0, programs, CHUNK)
    ][::-1]
    while waiting and time.monotonic() - start < seconds:
        running, broken = {}, []
        with new_pool(workers) as pool:
            while (waiting or running) and not broken:
                in_time = time.monotonic() - start < seconds
                while waiting and in_time and len(running) < workers:
                    numbers = waiting.pop()
                    running[pool.submit(check_numbers, seed, numbers)] = numbers
                if not running:
                    break
                done, _ = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for future in done:
                    numbers = running.pop(future)
                    try:
                        outcomes = future.result()
                    except BrokenProcessPool:
                        broken = [numbers, *running.values()]
                        break
                    take(totals, outcomes, start, programs)
        for numbers in broken:
            take(totals, check_one_by_one(seed, numbers), start, programs)
    return totals


def take(totals: Totals, outcomes: list[Outcome], start: float, programs: int) -> None:
    """Adds outcomes and says how far the run is."""
    for outcome in outcomes:
        totals.add(outcome)
        if outcome.wrong:
            say(f"\nWRONG {outcome.number}: {outcome.wrong}\n  {outcome.case!r}")
    took = time.monotonic() - start
    rate = took / max(totals.count, 1)
    say(
        f"\r{totals.count}/{programs} programs, {len(totals.wrong)} wrong, "
        f"{rate:.2f} s each ",
        end="" if sys.stderr.isatty() else "\n",
    )


def say(line: str, end: str = "\n") -> None:
    print(line, end=end, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------- output


def explain(outcome: Outcome) -> None:
    """Prints a wrong case, the simplest one like it, and a script for that."""
    print(f"\nWRONG {outcome.number}: {outcome.wrong}\n{outcome.case!r}")
    if outcome.wrong == "the process died":
        return
    simple = fuzz_case.simplified(
        outcome.case, lambda case: bool(check_case(0, case).wrong)
    )
    wrong = check_case(0, simple).wrong
    print(f"simplest: {simple!r}\n{wrong}")
    print(f"\n{fuzz_reproducer.reproducer(simple, wrong)}")


def share(part: int, whole: int) -> str:
    return f"{part:>6}  {part / whole:6.1%}" if whole else f"{part:>6}"


def show(totals: Totals) -> None:
    """Prints the tables."""
    print(f"\n{'programs':<24} {'all':>7} {'outlined':>15} {'bound':>15}")
    for kind in ("forward", "gradient"):
        for what in ("attention", "near miss"):
            group = f"{kind}, {what}"
            count = totals.programs[group]
            found = totals.programs[f"{group}, something outlined"]
            bound = totals.programs[f"{group}, something bound"]
            print(f"{group:<24} {count:>7} {share(found, count)} {share(bound, count)}")
    print(f"compiled by XLA: {totals.programs['compiled by XLA']}, others interpreted")
    print("\nsites")
    for name, count in sorted(totals.sites.items()):
        print(f"  {count:>6}  {name}")
    print("\nnot bound because")
    for reason, count in totals.near_misses.most_common(25):
        print(f"  {count:>6}  {reason}")
    print(f"\n{totals.count} programs, {len(totals.wrong)} wrong")


def record(totals: Totals, options: argparse.Namespace, seconds: float) -> dict:
    """Returns what the JSON file holds."""
    versions = {n: importlib.metadata.version(n) for n in ("jax", "jaxlib", "numpy")}
    command = f"--programs {options.programs} --seed {options.seed}"
    return {
        "command": f"python benchmarks/fuzz_attention.py {command}",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": versions,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "programs": totals.count,
        "wrong": len(totals.wrong),
        "wrong_cases": [repr(outcome.case) for outcome in totals.wrong],
        "seconds": round(seconds, 1),
        "seconds_per_program": round(totals.seconds / max(totals.count, 1), 4),
        "groups": dict(sorted(totals.programs.items())),
        "sites": dict(sorted(totals.sites.items())),
        "modes": dict(sorted(totals.modes.items())),
        "not_bound": dict(totals.near_misses.most_common(60)),
    }


def replay(text: str) -> int:
    """Checks one case given as its repr."""
    case = eval(text, {"Case": Case})
    outcome = check_case(0, case)
    print(f"{case!r}\nsites: {outcome.statuses}, {outcome.seconds:.2f} s")
    if outcome.wrong:
        explain(outcome)
    else:
        print("equal")
    return int(bool(outcome.wrong))


def main(argv: list[str] | None = None) -> int:
    """Runs the fuzz suite.

    Returns:
        1 if any program is wrong, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 4))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--case", help="check this one only, given as it is printed")
    options = parser.parse_args(argv)
    if options.case:
        return replay(options.case)
    start = time.monotonic()
    totals = run(options.seed, options.programs, options.seconds, options.workers)
    seconds = time.monotonic() - start
    show(totals)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    result = record(totals, options, seconds)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    say(f"wrote {options.output}")
    for outcome in totals.wrong[:5]:
        explain(outcome)
    return int(bool(totals.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
