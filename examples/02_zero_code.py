"""Run a plain script under the stage without editing it: `hlo-tools run`.

Runs `plain_script.py`, which knows nothing of hlo_tools, once with Python and once
with `hlo-tools run --report -`, compares what the two print and shows the report.
It exits with 1 if the outputs disagree by more than the stated tolerance.

    python examples/02_zero_code.py [--seq 1024] [--quick]
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("plain_script.py")
# The script prints losses near 6 in float32; another order of summation moves them
# by about 1e-6, and printing six decimals by as much again.
TOLERANCE = 1e-4
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")


def run(command: list[str]) -> tuple[list[str], str]:
    """Runs a command, which has to succeed.

    Returns:
        (the lines of its standard output, the time it states on standard error).
    """
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    times = [line for line in result.stderr.splitlines() if "ms a batch" in line]
    return result.stdout.splitlines(), "".join(times)


def difference(plain: list[str], staged: list[str]) -> float:
    """Returns the largest difference of the numbers in two outputs, inf if the
    text around them differs."""
    worst = 0.0
    for left, right in zip(plain, staged, strict=True):
        if NUMBER.sub("#", left) != NUMBER.sub("#", right):
            return float("inf")
        pairs = zip(NUMBER.findall(left), NUMBER.findall(right), strict=True)
        worst = max([worst, *(abs(float(a) - float(b)) for a, b in pairs)])
    return worst


def main(argv: list[str] | None = None) -> int:
    """Runs the script both ways.

    Returns:
        0 if the printed numbers agree within `TOLERANCE`, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--quick", action="store_true", help="smallest sizes")
    args = parser.parse_args(argv)
    script = [str(SCRIPT), "--seq", "128" if args.quick else str(args.seq)]

    print(f"$ python {SCRIPT.name}", flush=True)
    plain, plain_time = run([sys.executable, *script])
    print("\n".join(plain), plain_time, sep="\n")

    print(f"\n$ hlo-tools run --report - {SCRIPT.name}", flush=True)
    stage = [sys.executable, "-m", "hlo_tools", "run", "--report", "-"]
    staged, staged_time = run([*stage, *script])
    print("\n".join(staged), staged_time, sep="\n")

    # The script's own lines come first, the report after them.
    worst = difference(plain, staged[: len(plain)])
    verdict = "agree" if worst <= TOLERANCE else "DISAGREE"
    print(f"\nmax difference {worst:.1e}, tolerance {TOLERANCE:.0e}: {verdict}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
