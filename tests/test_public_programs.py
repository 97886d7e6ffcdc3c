"""Unmodified programs print the same under `hlo-tools run` as under `python`.

The programs in tests/programs know nothing of hlo_tools. Where no site was bound
their output has to be equal bit for bit; where one was, every printed number may
differ by what another order of summation costs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).with_name("programs")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
# A few float32 training steps: each adds about 1e-6, and AdamW amplifies it.
TOLERANCE = 1e-4
ARGUMENTS = {
    "mnist_cnn.py": ["--epochs", "1"],
    "nnx_lm.py": ["--steps", "3"],
    "optax_loop.py": ["--epochs", "3"],
    "equinox_transformer.py": ["--steps", "4"],
}
# On the newest JAX too: one program with attention is enough there.
SMOKE = ("nnx_lm.py",)


def python(*arguments, cwd=None, **environment):
    """Runs this Python, on the CPU, and returns the finished process."""
    settings = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
        cwd=cwd,
        timeout=280,
    )


def assert_close(plain, staged):
    """Two outputs have the same text and, within `TOLERANCE`, the same numbers."""
    assert NUMBER.sub("#", staged) == NUMBER.sub("#", plain)
    numbers = [list(map(float, NUMBER.findall(text))) for text in (plain, staged)]
    assert numbers[1] == pytest.approx(numbers[0], rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.smoke] if name in SMOKE else [])
        for name in ARGUMENTS
    ],
)
def test_program_prints_the_same(name, tmp_path):
    program, report = PROGRAMS / name, tmp_path / "report.json"
    plain = python(program, *ARGUMENTS[name])
    assert plain.returncode == 0, plain.stderr
    run = ["-m", "hlo_tools", "run", "--report", report]
    staged = python(*run, program, *ARGUMENTS[name])
    assert staged.returncode == 0, staged.stderr
    sites = json.loads(report.read_text())["sites"]
    assert not [site for site in sites if site["status"] == "failed"]
    if any(site["status"] == "bound" for site in sites):
        assert_close(plain.stdout, staged.stdout)
    else:
        assert staged.stdout == plain.stdout


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["return", "--report", "mine.json", "-m"], 0),
        (["exit", "3", "--help"], 3),
        (["raise", ""], 1),
    ],
    ids=["return", "exit", "raise"],
)
def test_arguments_and_exit_status_pass_through(arguments, status):
    program = PROGRAMS / "echo_argv.py"
    plain = python(program, *arguments)
    staged = python("-m", "hlo_tools", "run", program, *arguments)
    assert (staged.returncode, plain.returncode) == (status, status), staged.stderr
    assert staged.stdout == plain.stdout
    if arguments[0] == "raise":  # the program's own traceback, to its last line
        assert plain.stderr.strip().splitlines()[-1] in staged.stderr
        assert 'echo_argv.py", line' in staged.stderr


@pytest.mark.smoke
def test_a_module_runs_as_with_python_m():
    arguments = ["-m", "echo_argv", "exit", "4", "--epochs=1"]
    plain = python(*arguments, cwd=PROGRAMS)
    staged = python("-m", "hlo_tools", "run", *arguments, cwd=PROGRAMS)
    assert (staged.returncode, plain.returncode) == (4, 4), staged.stderr
    assert staged.stdout == plain.stdout
