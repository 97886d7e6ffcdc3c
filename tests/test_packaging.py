"""The distribution: what is installed, what a wheel holds, what the extras name."""

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[1]
DISTRIBUTION = "hlo-tools"
PACKAGES = ("hlo_tools", "pallas_kernels", "sharding")
EXTRAS = ("cuda", "dev", "llm", "tokamax", "tpu", "triton")
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def owners(package: str) -> set[str]:
    """Installed distributions that claim an import package."""
    return set(importlib.metadata.packages_distributions().get(package, ()))


@pytest.mark.smoke
@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_ours_alone(package: str) -> None:
    """PyPI has an unrelated `sharding` whose files would land among ours."""
    others = sorted(owners(package) - {DISTRIBUTION})
    remove = f"run `{sys.executable} -m pip uninstall {' '.join(others)}`"
    assert not others, (
        f"package {package!r} also comes from {others}: {remove}, then install "
        f"{DISTRIBUTION} again"
    )
    assert owners(package), f"{DISTRIBUTION} is not installed: run `make test`"


@pytest.mark.smoke
def test_imported_packages_are_this_checkout() -> None:
    for package in PACKAGES:
        file = importlib.import_module(package).__file__
        assert file is not None
        assert Path(file).resolve().parent == REPO / package


@pytest.mark.smoke
def test_versions_agree() -> None:
    import hlo_tools

    installed = importlib.metadata.version(DISTRIBUTION)
    assert installed == PROJECT["version"], "installed from another state: `make test`"
    assert hlo_tools.__version__ == installed


def requirements(extra: str) -> list[Requirement]:
    lines = PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def test_extras_are_the_documented_ones() -> None:
    metadata = importlib.metadata.metadata(DISTRIBUTION)
    assert sorted(PROJECT["optional-dependencies"]) == list(EXTRAS)
    assert sorted(metadata.get_all("Provides-Extra") or ()) == list(EXTRAS)


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_resolves(extra: str) -> None:
    """What an extra names exists: installed here in a version it allows, or pinned.

    `cuda` and `triton` need other hardware; their names are checked against jax's
    own extras and the spelling on PyPI.
    """
    pins = read_pins("constraints.txt")
    for requirement in requirements(extra):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        if requirement.name == "jax-triton":
            continue  # installs triton, so it is in no environment for CPUs
        version = pins[normalize(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} pins {version}"
        for wanted in requirement.extras:
            offered = importlib.metadata.metadata(requirement.name)
            assert wanted in (offered.get_all("Provides-Extra") or ()), requirement


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(file: str) -> dict[str, str]:
    lines = (REPO / file).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalize(name): version for name, version in pairs}


def test_pins_of_both_environments_differ_in_jax_alone() -> None:
    pins, newest = read_pins("constraints.txt"), read_pins("constraints-jax012.txt")
    differ = {name for name in newest if pins.get(name) != newest[name]}
    assert differ == {"jax", "jaxlib"}


def test_installed_packages_are_the_pinned_ones() -> None:
    """A package that the pins miss would be a different one on the next machine."""
    pins = read_pins("constraints.txt")
    wanted, seen = [DISTRIBUTION], set()
    missing = []
    while wanted:
        name = normalize(wanted.pop())
        if name in seen:
            continue
        seen.add(name)
        extras = ("", "dev") if name == DISTRIBUTION else ("",)
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            marker = needed.marker
            if marker and not any(marker.evaluate({"extra": e}) for e in extras):
                continue
            wanted.append(needed.name)
            if normalize(needed.name) not in pins:
                missing.append(needed.name)
    assert not missing, f"add to constraints.txt: {sorted(set(missing))}"


def source_files() -> set[str]:
    return {
        path.relative_to(REPO).as_posix()
        for package in PACKAGES
        for path in (REPO / package).rglob("*")
        if path.suffix in {".py", ".typed", ".json", ".html", ".css", ".js"}
    }


@pytest.mark.slow
def test_wheel_holds_the_three_packages(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="the wheel is built by setuptools")
    # In a copy: a build folder left in the checkout may hold files long removed.
    checkout = tmp_path / "checkout"
    for package in PACKAGES:
        shutil.copytree(REPO / package, checkout / package)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, checkout)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    done = subprocess.run(
        [*build, *options, str(checkout)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"hlo_tools-{PROJECT['version']}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == source_files()
    info = f"hlo_tools-{PROJECT['version']}.dist-info"
    assert f"{info}/licenses/LICENSE" in names
