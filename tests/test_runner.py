"""`hlo_tools.runner` runs a program as python would, and treats its jits."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# What `hlo-tools run` does, with the visible transform and without the parser.
RUN = textwrap.dedent("""
    import sys
    import sine_to_cosine
    from hlo_tools import runner
    from hlo_tools.driver import StageConfig

    sine_to_cosine.inject()
    kind, name, report, *args = sys.argv[1:]
    run = runner.run_module if kind == "-m" else runner.run_script
    sys.exit(run(name, args, StageConfig(""), report=report or None))
    """)

SINE = "import jax, jax.numpy as jnp; print(round(float(jax.jit(jnp.sin)(0.0)), 3))"

FILES = {
    "package/__init__.py": "print('package', __name__)",
    "package/__main__.py": "from package import inner\nprint(__package__, __name__)",
    "package/inner.py": "print('inner', __name__, __spec__.name)",
    "package/bare/__init__.py": "",
    "package/broken.py": "import no_such_module_at_all",
    "facts.py": """
        import os, pickle, sys
        import __main__
        import package

        class Thing: pass

        print(__name__, __file__, __doc__, __spec__ and __spec__.name, __package__)
        print([os.path.basename(a) for a in sys.argv], sys.path[0] == os.getcwd())
        copy = pickle.loads(pickle.dumps(Thing()))
        print(__main__.Thing is Thing, isinstance(copy, Thing))
        """,
    "raises.py": """
        import jax

        def f(x):
            raise KeyError("as told")

        try:
            1 / 0
        except ZeroDivisionError:
            jax.jit(f)(1)
        """,
    "syntax.py": "x = 1\nif x\n",
    "interrupt.py": "raise KeyboardInterrupt",
    "message.py": "import sys; sys.exit('a message')",
    "none.py": "import sys; sys.exit()",
    "status.py": "import sys; sys.exit(7)",
    "hook.py": """
        import sys
        sys.excepthook = lambda kind, *rest: print("hook", kind.__name__)
        raise ValueError
        """,
    "at_exit.py": """
        import atexit, threading, time
        import __main__
        value = 3
        atexit.register(lambda: print("exit", __main__.value))
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        print("end")
        """,
    "sine.py": SINE,
}

SAME = [
    ("", "facts.py", "--flag", "a b"),
    ("-m", "facts", "--flag"),
    ("-m", "package"),
    ("-m", "package.inner"),
    ("-m", "package.broken"),
    ("", "raises.py"),
    ("-m", "raises"),
    ("", "syntax.py"),
    ("", "message.py"),
    ("", "none.py"),
    ("", "status.py"),
    ("", "hook.py"),
    ("", "at_exit.py"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs").resolve()
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return folder


def python(folder, *arguments):
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    settings = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "HLO_TOOLS": ""}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **settings},
        timeout=280,
    )


def run(folder, kind, name, *arguments, report=""):
    return python(folder, "-c", RUN, kind or "script", name, report, *arguments)


def without_runpy(text):
    """A traceback without the frames of `python -m` itself."""
    lines = text.splitlines()
    return [line for line in lines if "<frozen runpy>" not in line]


@pytest.mark.parametrize("arguments", SAME, ids=" ".join)
def test_as_python_would(folder, arguments):
    kind, name, *rest = arguments
    expected = python(folder, *([kind] if kind else []), name, *rest)
    got = run(folder, kind, name, *rest)
    assert got.returncode == expected.returncode
    assert got.stdout == expected.stdout
    if name != "package.broken":  # importlib's own frames differ there
        assert without_runpy(got.stderr) == without_runpy(expected.stderr)
    assert "runner.py" not in got.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("", "missing.py"), 2, "missing.py': [Errno 2]"),
        (("-m", "missing"), 1, "No module named missing"),
        (("-m", "missing.inner"), 1, "No module named missing.inner"),
        (("-m", "package.bare"), 1, "package.bare is a package without a __main__"),
        (("", "interrupt.py"), 130, "KeyboardInterrupt"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_what_can_not_run(folder, arguments, status, message):
    done = run(folder, *arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert "runner.py" not in done.stderr


@pytest.mark.parametrize("arguments", [("", "sine.py"), ("-m", "sine")], ids=" ".join)
def test_every_jit_is_treated(folder, arguments):
    assert run(folder, *arguments).stdout == "1.0\n"


def test_reports(folder, tmp_path):
    for suffix in ("json", "html", "txt"):
        path = tmp_path / f"report.{suffix}"
        assert run(folder, "", "sine.py", report=str(path)).returncode == 0
        text = path.read_text()
        assert "jit_sin" in text
        if suffix == "json":
            data = json.loads(text)
            assert data["module"] == "sine.py"
            assert [site["status"] for site in data["sites"]] == ["bound"]
    done = run(folder, "", "sine.py", report="-")
    assert done.stdout.startswith("1.0\n")
    assert "jit_sin" in done.stdout


def test_a_report_is_written_after_a_failure_too(folder, tmp_path):
    path = tmp_path / "report.json"
    assert run(folder, "", "raises.py", report=str(path)).returncode == 1
    assert json.loads(path.read_text())["schema_version"] == 1
    done = run(folder, "", "none.py", report=str(tmp_path / "missing" / "r.json"))
    assert done.returncode == 2
    assert "r.json" in done.stderr
