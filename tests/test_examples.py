"""Every example runs, in its quick mode, as a user would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Scripts that other examples run; they have no quick mode of their own.
ARGUMENTS = {"plain_script.py": ["--seq", "64", "--batches", "1"]}
EXPECTED = {
    "01_train_step.py": ["tolerance 1e-04: agree", "Report of the eval step"],
    "02_zero_code.py": ["tolerance 1e-04: agree", "hlo-tools run --report -"],
    "04_user_patterns.py": [
        f"{name}: bound, backward bound: True"
        for name in ("one_product_geglu", "fused_gate", "fast_power_norm")
    ],
    "03_own_pass.py": ["stablehlo.sine %arg0", "same values: True"],
    "plain_script.py": ["batch 0: loss"],
}


def test_every_example_has_expectations():
    assert sorted(EXPECTED) == [path.name for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path, tmp_path):
    arguments = ARGUMENTS.get(path.name, ["--quick"])
    result = subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,  # an example must not need the repository as its folder
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for text in EXPECTED[path.name]:
        assert text in result.stdout
