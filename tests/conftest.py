"""What every test shares: the devices JAX sees, the data folder, Hypothesis."""

import os
from pathlib import Path

import hypothesis
import pytest

# Before JAX is imported; a value set outside wins, so the suite can run on a GPU.
# The variables reach the programs that tests start as well.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# libtpu only compiles here: no metadata server to ask, and several test processes
# may load it at once (it guards a real TPU with a lock file otherwise).
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# `HLO_TOOLS=off` in the caller's shell would make the tests compare JAX with JAX.
os.environ.pop("HLO_TOOLS", None)

import jax

NUM_CPU_DEVICES = 8

# In the configuration, not in XLA_FLAGS, so that the programs which tests start see
# one device, as a user's do. JAX refuses the option beside the flag.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)

# A compile inside an example outlasts any deadline; fixed seeds keep CI repeatable.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repo_dir() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of model and corpus files that lives beside the checkout.

    `HLO_TOOLS_SHARED` names it, otherwise it is `../shared`. It is too large to be
    part of the repository; tests that need it are skipped without it.
    """
    named = os.environ.get("HLO_TOOLS_SHARED")
    path = Path(named) if named else REPO.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"no data folder at {path}; set HLO_TOOLS_SHARED to its path")
    return path.resolve()


def pytest_terminal_summary(terminalreporter) -> None:
    """The table of `test_compile_kernels.py`: what was compiled for what."""
    outcomes = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if "compiled" in properties:  # the last of a test's is what became of it
                kernel, target, outcome = properties["compiled"]
                outcomes[kernel, target] = outcome
    if not outcomes:
        return
    terminalreporter.section("kernels compiled")
    width = max(len(kernel) for kernel, _ in outcomes)
    for (kernel, target), outcome in sorted(outcomes.items()):
        terminalreporter.write_line(f"{kernel:{width}}  {target:6}  {outcome}")
