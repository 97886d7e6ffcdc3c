"""The table of devices, and how names, kinds and devices find their row."""

import importlib.util
from types import SimpleNamespace

import jax
import pytest

from hlo_tools.errors import UnknownNameError, UnsupportedError
from hlo_tools.targets import (
    ALIASES,
    DEVICE_KINDS,
    DEVICE_SPECS,
    KIND_PREFIXES,
    TPU_TOPOLOGIES,
    Target,
)

KINDS = {
    "cpu": "cpu",
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}


def device(kind: str, platform: str) -> SimpleNamespace:
    return SimpleNamespace(device_kind=kind, platform=platform)


@pytest.mark.parametrize("name", DEVICE_SPECS)
def test_rows_are_whole(name: str) -> None:
    spec = DEVICE_SPECS[name]
    assert spec.name == name
    assert spec.platform in ("cpu", "gpu", "tpu")
    assert {"float32", "bfloat16"} <= set(spec.matmul_flops)
    assert min(spec.matmul_flops.values()) > 0
    assert spec.memory_bandwidth > 0
    assert spec.memory_bytes > 0
    assert spec.launch_seconds > 0
    assert len(spec.source) > 10
    assert hash(spec) == hash(DEVICE_SPECS[name])


def test_tables_agree() -> None:
    assert set(DEVICE_KINDS) == set(DEVICE_SPECS)
    assert set(ALIASES.values()) <= set(DEVICE_SPECS)
    assert set(KIND_PREFIXES.values()) <= set(DEVICE_SPECS)
    tpus = {name for name, spec in DEVICE_SPECS.items() if spec.platform == "tpu"}
    assert set(TPU_TOPOLOGIES) == tpus
    for name, kind in DEVICE_KINDS.items():
        assert Target.parse(kind).spec.name == name


@pytest.mark.parametrize("name", [*DEVICE_SPECS, "H200", " v5litepod ", "trillium"])
def test_parse(name: str) -> None:
    target = Target.parse(name)
    assert target.platform == target.spec.platform
    assert target.device_kind == DEVICE_KINDS[target.spec.name]
    assert target.num_devices == 1
    assert target.note == ""


@pytest.mark.parametrize("name", ["h20", "v5x", "tpu", "H2000", ""])
def test_parse_unknown(name: str) -> None:
    with pytest.raises(UnknownNameError, match="target"):
        Target.parse(name)


def test_parse_unknown_names_the_closest() -> None:
    with pytest.raises(UnknownNameError, match="h200"):
        Target.parse("h20")


@pytest.mark.parametrize("kind", KINDS)
def test_from_devices(kind: str) -> None:
    target = Target.from_devices([device(kind, "any")] * 3)
    assert target.spec is DEVICE_SPECS[KINDS[kind]]
    assert target.device_kind == kind
    assert target.num_devices == 3
    assert target.note == ""


@pytest.mark.parametrize(
    ("kind", "platform", "expected"),
    [
        ("NVIDIA B300", "gpu", "gpu"),
        ("AMD Instinct MI300X", "rocm", "gpu"),
        ("NVIDIA L4", "cuda", "gpu"),
        ("TPU v9", "tpu", "tpu"),
    ],
)
def test_from_devices_unknown(kind: str, platform: str, expected: str) -> None:
    target = Target.from_devices([device(kind, platform)])
    assert target.platform == target.spec.platform == expected
    assert target.device_kind == kind
    assert kind in target.note


def test_from_devices_at_hand() -> None:
    devices = jax.devices()
    target = Target.from_devices(devices)
    assert target.devices == tuple(devices)
    assert target.num_devices == len(devices)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
@pytest.mark.parametrize("name", TPU_TOPOLOGIES)
def test_tpu_topology(name: str) -> None:
    target = Target.topology(name)
    assert target.spec.name == name
    assert target.num_devices >= 4
    assert target.devices is not None
    assert target.devices[0].platform == "tpu"


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
def test_tpu_topology_shapes() -> None:
    assert Target.topology("v5e:4x4").num_devices == 16
    with pytest.raises(UnsupportedError, match="3x5"):
        Target.topology("v5e:3x5")


def test_topology_says_what_is_missing(tmp_path) -> None:
    with pytest.raises(UnsupportedError, match="topology file"):
        Target.topology("h200")
    with pytest.raises(UnsupportedError, match="CPU"):
        Target.topology("cpu")
    with pytest.raises(UnknownNameError):
        Target.topology("h2000")


@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda13") is None
    if importlib.util.find_spec("jax_plugins")
    else True,
    reason="JAX's CUDA plugin is not installed",
)
def test_gpu_topology(shared_dir) -> None:
    path = shared_dir / "targets" / "h200_topology.bin"
    target = Target.topology("h200", path)
    assert target.spec.name == "h200"
    assert target.num_devices == 1
