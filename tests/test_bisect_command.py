"""`hlo-tools bisect SCRIPT`: whose options are whose, and odd scripts."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import bisect_fixtures as fixtures
import pytest

from hlo_tools import cli, cli_bisect
from hlo_tools.cli_parsing import is_script, own_options_first
from hlo_tools.errors import HloToolsError

TESTS = Path(__file__).parent
OURS = {"--check", "-o", "--output", "-m"}


@pytest.mark.parametrize(
    ("given", "arranged"),
    [
        ("a.py --check x", "--check x a.py --"),
        ("a.py --check=x y", "--check=x a.py -- y"),
        ("a.py --steps 3 -o out y", "-o out a.py -- --steps 3 y"),
        ("-o out a.py --check x -- --check y", "--check x -o out a.py -- --check y"),
        ("-m pkg --check x --help", "--check x -m pkg -- --help"),
        ("a.py -m x", "a.py -- -m x"),
        ("x.mlir --check x", "x.mlir --check x"),
        ("-- a.py --check x", "-- a.py --check x"),
    ],
)
def test_our_options_may_follow_the_script(given, arranged):
    assert own_options_first(given.split(), OURS, is_script) == arranged.split()


@pytest.mark.parametrize("rest", ["--check", "--check -- x"])
def test_a_value_that_is_missing(rest):
    with pytest.raises(HloToolsError, match=r"--check needs a value.* goes after --"):
        own_options_first(["a.py", *rest.split()], OURS, is_script)


def test_a_request_as_the_parser_sees_it(monkeypatch):
    seen = []
    monkeypatch.setattr(cli_bisect, "run_bisect", lambda *args: seen.append(args) or 0)
    line = "bisect train.py --steps 10 --check mine:good --tolerance 0.5 -- -o own"
    assert cli.main(line.split()) == 0
    ((request, _),) = seen
    assert request.program.name == "train.py"
    assert request.program.arguments == ("--steps", "10", "-o", "own")
    assert (request.check, request.tolerance) == ("mine:good", 0.5)
    assert request.output == cli_bisect.DEFAULT_FOLDER


def test_help_says_how(capsys):
    assert cli.main(["bisect", "--help"]) == 0
    assert "script.py --check CHECK --" in " ".join(capsys.readouterr().out.split())


def bisect(folder: Path, program: str, *arguments: str):
    (folder / "program.py").write_text(textwrap.dedent(program))
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return subprocess.run(
        [sys.executable, "-m", "hlo_tools", "bisect", "program.py", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_a_script_that_fails(tmp_path):
    done = bisect(tmp_path, "import not_there_at_all")
    assert done.returncode == 2
    assert "No module named 'not_there_at_all'" in done.stderr
    assert "program.py fails" in done.stderr


PROGRAM = """
    import jax, jax.numpy as jnp
    from bisect_fixtures import attention

    @jax.jit
    def step(q):
        return jnp.sin(attention(q, q, q, 0.3)) + q

    step(jnp.ones((1, 8, 1, 4)))
"""


def test_a_pass_of_ones_own_where_nothing_is_bound(tmp_path):
    """The script and its module agree on what is to blame."""
    passes = "inline-calls,bisect_fixtures:SubtractForAdd"
    done = bisect(tmp_path, PROGRAM, "--passes", passes)
    assert done.returncode == 1, done.stderr
    assert "bisect_fixtures:SubtractForAdd is to blame" in done.stdout
    assert "nothing is bound in it" in done.stderr


def test_the_reason_why_there_is_nothing_to_bisect(tmp_path):
    done = bisect(tmp_path, PROGRAM, "--passes", "inline-calls,cse")
    assert done.returncode == 0, done.stderr
    assert "nothing was bound" in done.stderr
    done = bisect(tmp_path, PROGRAM, "--passes", "")
    assert "no module was changed by the passes" in done.stderr


def test_the_reproducer_goes_by_the_tolerance_that_was_given(tmp_path, monkeypatch):
    """What is to blame under a tolerance is so in the reproducer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("model.mlir").write_text(fixtures.text_of(lambda q, k, v: (q + k) + 1e-6 * v))
    passes = "bisect_fixtures:SubtractForAdd"
    assert cli.main(["bisect", "model.mlir", "--passes", passes]) == 0
    strict = ["--tolerance", "0"]
    assert cli.main(["bisect", "model.mlir", "--passes", passes, *strict]) == 1
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, "hlo-tools-bisect/reproduce.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 1, done.stdout
    assert "allowed 0" in done.stdout
