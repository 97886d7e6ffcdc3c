"""A Python that has JAX's CUDA plugin, to compile for a GPU without one.

Once loaded the plugin stays, and where it is installed JAX looks for a GPU at every
start: so it has an environment of its own, `make venv-cuda`, and a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
OWN = TESTS.parent / ".venv-cuda/bin/python"
MISSING = "no CUDA plugin: make venv-cuda, or pip install 'hlo-tools[cuda]'"


def cuda_python() -> str | None:
    """Returns the path of one, or None."""
    if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(
        "jax_plugins.xla_cuda13"
    ):
        return sys.executable
    return str(OWN) if OWN.exists() else None


def run_with_cuda(program: str, *arguments: str) -> str:
    """Runs statements, which can import the test modules; returns what they print."""
    python = cuda_python()
    assert python is not None
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [python, "-c", program, *arguments],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
