"""What a module is compiled for: a device's numbers, and compile-only devices.

A cost model needs a handful of numbers of a device; here they are, one row a device,
from its datasheet. Add a device: one row here, one row in `KIND_PREFIXES`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlo_tools.errors import UnknownNameError, UnsupportedError

TERA, GIGA, GIB = 1e12, 1e9, 1 << 30


@dataclass(frozen=True)
class DeviceSpec:
    """The numbers of one device, as JAX counts devices.

    Attributes:
      name: row name, e.g. "h200".
      platform: "cpu", "gpu" or "tpu".
      matmul_flops: dtype name -> dense matmul FLOP/s at peak. "tf32" is the rate of
        float32 operands at default precision, where it differs from "float32".
      memory_bandwidth: bytes/s of the main memory.
      memory_bytes: its size.
      launch_seconds: fixed cost of one kernel or library call.
      source: where the numbers are from.
    """

    name: str
    platform: str
    matmul_flops: dict[str, float]
    memory_bandwidth: float
    memory_bytes: int
    launch_seconds: float
    source: str

    def __hash__(self) -> int:
        return hash((self.name, self.platform, self.memory_bandwidth))


def _nvidia(name, bf16, tf32, f32, f64, int8, bandwidth, memory, source) -> DeviceSpec:
    """A GPU row; rates in TFLOP/s without sparsity, GB/s, GB."""
    rates = {
        "bfloat16": bf16, "float16": bf16, "tf32": tf32, "float32": f32,
        "float64": f64, "int8": int8,
    }  # fmt: skip
    return DeviceSpec(
        name, "gpu", {k: v * TERA for k, v in rates.items()}, bandwidth * GIGA,
        int(memory * GIGA), 3e-6, source,
    )  # fmt: skip


def _tpu(name, bf16, int8, bandwidth, memory, source) -> DeviceSpec:
    """A TPU row; TFLOP/s, GB/s, GiB. float32 at full precision takes 6 bf16 passes."""
    rates = {"bfloat16": bf16, "tf32": bf16, "float32": bf16 / 6, "int8": int8}
    return DeviceSpec(
        name, "tpu", {k: v * TERA for k, v in rates.items()}, bandwidth * GIGA,
        memory * GIB, 2e-6, source,
    )  # fmt: skip


def _cpu() -> DeviceSpec:
    """The host: what one AVX-512 core was measured to reach, times the cores."""
    cores = usable_cores()
    rate = 100 * GIGA * cores
    return DeviceSpec(
        name="cpu",
        platform="cpu",
        # bfloat16 and float16 operands are widened to float32 before the product
        matmul_flops={
            "float32": rate,
            "bfloat16": rate,
            "float16": rate,
            "float64": rate / 2,
        },
        memory_bandwidth=min(10 * GIGA * cores, 200 * GIGA),
        memory_bytes=_host_memory(),
        launch_seconds=5e-6,
        source="measured: XLA's float32 products on one 2.8 GHz AVX-512 core reach"
        " 75 to 130 GFLOP/s (benchmarks/online_attention_cpu.py), times the cores",
    )


def usable_cores() -> int:
    """Returns how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on every system
        return 8 * GIB


# Dense rates; NVIDIA's datasheets print twice that, "with sparsity".
DEVICE_SPECS: dict[str, DeviceSpec] = {
    "cpu": _cpu(),
    "h200": _nvidia(
        "h200", 989.5, 494.7, 66.9, 66.9, 1979, 4800, 141,
        "NVIDIA H200 datasheet, SXM",
    ),
    "h100": _nvidia(
        "h100", 989.5, 494.7, 66.9, 66.9, 1979, 3350, 80,
        "NVIDIA H100 datasheet, SXM5",
    ),
    "h100-pcie": _nvidia(
        "h100-pcie", 756, 378, 51, 51, 1513, 2000, 80,
        "NVIDIA H100 datasheet, PCIe",
    ),
    "a100": _nvidia(
        "a100", 312, 156, 19.5, 19.5, 624, 2039, 80,
        "NVIDIA A100 datasheet, SXM4 80 GB",
    ),
    "a100-40gb": _nvidia(
        "a100-40gb", 312, 156, 19.5, 19.5, 624, 1555, 40,
        "NVIDIA A100 datasheet, 40 GB",
    ),
    "v4": _tpu(
        "v4", 275, 275, 1228, 32,
        "Google Cloud documentation, TPU v4, one chip (megacore: one device)",
    ),
    "v5e": _tpu("v5e", 197, 394, 819, 16, "Google Cloud documentation, TPU v5e"),
    "v5p": _tpu(
        "v5p", 459, 918, 2765, 95,
        "Google Cloud documentation, TPU v5p, one chip (megacore: one device)",
    ),
    "v6e": _tpu("v6e", 918, 1836, 1638, 32, "Google Cloud documentation, TPU v6e"),
    "tpu7x": _tpu(
        "tpu7x", 1153.5, 1153.5, 3690, 96,
        "Google Cloud documentation, TPU7x, halved: a chip is two devices in JAX;"
        " int8 as bfloat16, since the documentation gives a rate for fp8 only",
    ),
}  # fmt: skip

# start of jax.Device.device_kind -> row; the longest match counts
KIND_PREFIXES: dict[str, str] = {
    "cpu": "cpu",
    "NVIDIA H200": "h200",
    "NVIDIA GH200": "h100",
    "NVIDIA H100": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA A100": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "TPU v7": "tpu7x",
}

# For a device that is not in the table: a small one of its platform, whose ratio of
# arithmetic to bandwidth is low, so that a kernel must win clearly to be chosen.
FALLBACKS: dict[str, str] = {"cpu": "cpu", "gpu": "a100", "tpu": "v4"}

ALIASES: dict[str, str] = {
    "h200-sxm": "h200", "nvidia-h200": "h200",
    "h100-sxm": "h100", "nvidia-h100": "h100", "gh200": "h100",
    "nvidia-a100": "a100", "sm90": "h100", "sm80": "a100",
    "tpu-v4": "v4", "v5litepod": "v5e", "v5lite": "v5e", "tpu-v5e": "v5e",
    "v5": "v5p", "tpu-v5p": "v5p", "v6": "v6e", "trillium": "v6e", "tpu-v6e": "v6e",
    "v7": "tpu7x", "v7x": "tpu7x", "7x": "tpu7x", "ironwood": "tpu7x",
}  # fmt: skip

DEVICE_KINDS: dict[str, str] = {
    "cpu": "cpu", "h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe", "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB", "v4": "TPU v4", "v5e": "TPU v5 lite",
    "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x",
}  # fmt: skip

# row -> smallest topology of one host that libtpu accepts, and its options
TPU_TOPOLOGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "v4": ("2x2x1", {"chip_config_name": "megacore"}),
    "v5e": ("2x2", {}),
    "v5p": ("2x2x1", {}),
    "v6e": ("2x2", {}),
    "tpu7x": ("2x2x1", {}),
}


@dataclass(frozen=True)
class Target:
    """What a module is compiled for.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      spec: the device's numbers.
      device_kind: as `jax.Device.device_kind`.
      num_devices: how many of them.
      devices: the devices themselves, attached or compile-only, where known.
      note: what is uncertain about `spec`, or "".
    """

    platform: str
    spec: DeviceSpec
    device_kind: str
    num_devices: int = 1
    devices: tuple[Any, ...] | None = None
    note: str = ""

    @classmethod
    def parse(cls, name: str) -> Target:
        """Returns the target of a name such as "cpu", "h200" or "v5e".

        Args:
          name: a row of `DEVICE_SPECS`, an alias, or a `device_kind`; case and
            spaces do not matter.

        Raises:
          UnknownNameError: none of these; lists the closest rows.
        """
        row = _row_of(name)
        return cls(DEVICE_SPECS[row].platform, DEVICE_SPECS[row], DEVICE_KINDS[row])

    @classmethod
    def from_devices(cls, devices: Sequence[Any]) -> Target:
        """Returns the target that a list of JAX devices is.

        A device that is not in the table gets the numbers of a modest one of its
        platform, and the target says so in `note`.

        Args:
          devices: at least one device, all alike.
        """
        devices = tuple(devices)
        kind = devices[0].device_kind
        row = _row_of_kind(kind)
        if row is not None:
            spec = DEVICE_SPECS[row]
            return cls(spec.platform, spec, kind, len(devices), devices)
        known = {"cuda": "gpu", "rocm": "gpu", "gpu": "gpu", "tpu": "tpu"}
        platform = known.get(devices[0].platform, "cpu")
        row = FALLBACKS[platform]
        note = f"no numbers for {kind!r}: those of {row} are assumed"
        spec = DEVICE_SPECS[row]
        return cls(platform, spec, kind, len(devices), devices, note)

    @classmethod
    def topology(cls, name: str, topology_file: str | Path | None = None) -> Target:
        """Returns a target whose devices can be compiled for, but not run on.

        Args:
          name: as in `parse`; a TPU may add its shape, as in "v5e:4x4".
          topology_file: for GPUs, a file with a serialized topology, which
            `jax.experimental.topologies.TopologyDescription.serialize` writes on a
            machine that has the GPU.

        Raises:
          UnsupportedError: the compiler for the device is not installed.
          UnknownNameError: unknown name.
        """
        row_name, _, shape = name.partition(":")
        row = _row_of(row_name)
        if DEVICE_SPECS[row].platform == "tpu":
            devices = _tpu_devices(row, shape)
        elif DEVICE_SPECS[row].platform == "gpu":
            devices = _gpu_devices(row, topology_file)
        else:
            raise UnsupportedError("the CPU needs no topology: compile for it directly")
        return cls.from_devices(devices)


def _row_of(name: str) -> str:
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in DEVICE_SPECS:
        return key
    row = _row_of_kind(name.strip())
    if row is None:
        raise UnknownNameError("target", name, sorted(DEVICE_SPECS))
    return row


def _row_of_kind(kind: str) -> str | None:
    """Returns the row of a device kind, or None; a prefix must end with a word."""
    lowered = kind.lower()
    found = [
        prefix
        for prefix in KIND_PREFIXES
        if lowered.startswith(prefix.lower())
        and not lowered[len(prefix) :][:1].isalnum()
    ]
    return KIND_PREFIXES[max(found, key=len)] if found else None


def _tpu_devices(row: str, shape: str) -> list[Any]:
    # libtpu asks a cloud server for its topology unless told not to, and guards
    # the chip with a lock file that a compiler does not need.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if importlib.util.find_spec("libtpu") is None:
        raise UnsupportedError(
            "compiling for a TPU needs libtpu: pip install 'hlo-tools[tpu]'"
        )
    default, options = TPU_TOPOLOGIES[row]
    return _describe_tpu(f"{row}:{shape or default}", tuple(options.items()))


@functools.cache
def _describe_tpu(topology_name: str, options: tuple[tuple[str, Any], ...]):
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(
            topology_name, platform="tpu", **dict(options)
        )
    except Exception as error:  # libtpu's own error types are private
        raise UnsupportedError(f"libtpu refuses {topology_name!r}: {error}") from error
    return list(found.devices)


def _gpu_devices(row: str, topology_file: str | Path | None) -> list[Any]:
    if topology_file is None:
        raise UnsupportedError(
            f"compiling for {row} without one needs a topology file, written by"
            " jax.experimental.topologies.get_attached_topology().serialize()"
        )
    for version in (13, 12):
        try:
            plugin = importlib.import_module(f"jax_plugins.xla_cuda{version}")
        except ImportError:
            continue
        try:
            plugin.initialize()
        except Exception as error:  # its type is private; JAX may have been first
            if "ALREADY_EXISTS" not in str(error):
                raise
        break
    else:
        raise UnsupportedError(
            "compiling for a GPU needs JAX's CUDA plugin: pip install 'hlo-tools[cuda]'"
        )
    from jax.experimental import topologies

    data = Path(topology_file).read_bytes()
    return list(topologies.TopologyDescription.deserialize(data).devices)
