"""What a model of one kernel needs of a device: its cores, their memories, their rates.

`DeviceSpec` has what a device does as a whole; here is what one of its cores does in a
cycle. Rows have the names of `DEVICE_SPECS`; every number has its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hlo_tools.errors import UnsupportedError
from hlo_tools.targets import DeviceSpec

KIB, MIB, GIGA = 1 << 10, 1 << 20, 1e9


@dataclass(frozen=True)
class GpuChip:
    """One NVIDIA GPU; rates are of one SM in one cycle.

    Attributes:
      cores: SMs.
      clock: boost, Hz: the one the datasheet's rates are at.
      smem_per_core: bytes of shared memory of an SM.
      smem_per_block: bytes of it that one CTA can have.
      registers: 32-bit registers of an SM.
      matmul_flops: dense bfloat16 FLOP of the tensor cores.
      exps: exponentials and other special functions.
      fmas: float32 operations (an FMA is one).
      smem_bytes: read from shared memory.
      l2_bytes: size of the L2.
      l2_bandwidth: bytes/s, of the whole GPU.
      sources: field -> where its number is from.
    """

    cores: int
    clock: float
    smem_per_core: int
    smem_per_block: int
    registers: int
    matmul_flops: int
    exps: int
    fmas: int
    smem_bytes: int
    l2_bytes: int
    l2_bandwidth: float
    sources: Mapping[str, str]

    def __hash__(self) -> int:
        return hash((self.cores, self.clock, self.l2_bytes))


@dataclass(frozen=True)
class TpuChip:
    """One TPU, as JAX counts devices; rates are of one TensorCore.

    Attributes:
      cores: TensorCores of a device.
      vmem_per_core: bytes of vector memory.
      mxu_size: rows and columns of a systolic array.
      mxus: of a core.
      clock: Hz at which they give the datasheet's rate; None where two published
        numbers contradict each other.
      sources: field -> where its number is from.
    """

    cores: int
    vmem_per_core: int
    mxu_size: int
    mxus: int
    clock: float | None
    sources: Mapping[str, str]

    def __hash__(self) -> int:
        return hash((self.cores, self.vmem_per_core, self.mxu_size, self.mxus))


_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture white paper"
_AMPERE = "NVIDIA A100 Tensor Core GPU Architecture white paper"
_CUDA = "CUDA C++ Programming Guide, "
_THROUGHPUT = _CUDA + "throughput of native arithmetic instructions"
_CAPABILITIES = _CUDA + "technical specifications per compute capability"
_BANKS = _CUDA + "shared memory: 32 banks of 4 bytes a cycle"

_HOPPER_SOURCES = {
    "cores": _HOPPER,
    "clock": "the datasheet's dense bfloat16 rate over cores and FLOP in a cycle",
    "smem_per_core": _HOPPER,
    "smem_per_block": _CAPABILITIES + ", 9.0",
    "registers": _CAPABILITIES + ", 9.0",
    "matmul_flops": _HOPPER + ": 4 tensor cores of 512 FMA",
    "exps": _THROUGHPUT + ", 9.0",
    "fmas": _THROUGHPUT + ", 9.0",
    "smem_bytes": _BANKS,
    "l2_bytes": _HOPPER,
    "l2_bandwidth": "not published: 5120 bytes a cycle, as the A100's; attention"
    " kernels move 5.5 TB/s of it, so it is more than that; to be measured",
}
_AMPERE_SOURCES = {
    "cores": _AMPERE,
    "clock": _AMPERE,
    "smem_per_core": _AMPERE,
    "smem_per_block": _CAPABILITIES + ", 8.0",
    "registers": _CAPABILITIES + ", 8.0",
    "matmul_flops": _AMPERE + ": 4 tensor cores of 256 FMA",
    "exps": _THROUGHPUT + ", 8.0",
    "fmas": _THROUGHPUT + ", 8.0",
    "smem_bytes": _BANKS,
    "l2_bytes": _AMPERE,
    "l2_bandwidth": _AMPERE + ": 5120 bytes a cycle",
}
_JAX_TPU = "jax 0.11.2, pallas.tpu.get_tpu_info"
_CLOUD = "Google Cloud documentation, TPU system architecture"


def _hopper(cores: int, clock: float) -> GpuChip:
    return GpuChip(
        cores=cores, clock=clock, smem_per_core=228 * KIB, smem_per_block=227 * KIB,
        registers=1 << 16, matmul_flops=4096, exps=16, fmas=128, smem_bytes=128,
        l2_bytes=50 * MIB, l2_bandwidth=5120 * clock, sources=_HOPPER_SOURCES,
    )  # fmt: skip


def _ampere() -> GpuChip:
    return GpuChip(
        cores=108, clock=1.41 * GIGA, smem_per_core=164 * KIB,
        smem_per_block=163 * KIB, registers=1 << 16, matmul_flops=2048, exps=16,
        fmas=64, smem_bytes=128, l2_bytes=40 * MIB,
        l2_bandwidth=5120 * 1.41 * GIGA, sources=_AMPERE_SOURCES,
    )  # fmt: skip


def _tpu(cores, vmem, size, mxus, clock) -> TpuChip:
    """VMEM in MiB, clock in GHz."""
    sources = {
        "cores": _CLOUD,
        "vmem_per_core": _JAX_TPU,
        "mxu_size": _JAX_TPU,
        "mxus": _JAX_TPU,
        "clock": "the datasheet's bfloat16 rate over MXUs and their FLOP in a cycle",
    }
    if clock is None:
        sources["clock"] = "none: the rate over the MXUs named would be over 3 GHz"
    hertz = None if clock is None else clock * GIGA
    return TpuChip(cores, vmem * MIB, size, mxus, hertz, sources)


# row of DEVICE_SPECS -> its cores
CHIPS: dict[str, GpuChip | TpuChip] = {
    "h200": _hopper(132, 1.83 * GIGA),
    "h100": _hopper(132, 1.83 * GIGA),
    "h100-pcie": _hopper(114, 1.62 * GIGA),
    "a100": _ampere(),
    "a100-40gb": _ampere(),
    "v4": _tpu(2, 16, 128, 4, 1.05),
    "v5e": _tpu(1, 128, 128, 4, 1.5),
    "v5p": _tpu(2, 64, 128, 4, 1.75),
    "v6e": _tpu(1, 128, 256, 2, None),
    "tpu7x": _tpu(1, 64, 256, 2, None),
}


def gpu_chip(spec: DeviceSpec) -> GpuChip:
    """Returns the cores of a GPU.

    Raises:
      UnsupportedError: no such row, or no GPU.
    """
    chip = CHIPS.get(spec.name)
    if not isinstance(chip, GpuChip):
        raise UnsupportedError(f"no numbers of a GPU's cores for {spec.name}")
    return chip


def tpu_chip(spec: DeviceSpec) -> TpuChip:
    """Returns the cores of a TPU.

    Raises:
      UnsupportedError: no such row, or no TPU.
    """
    chip = CHIPS.get(spec.name)
    if not isinstance(chip, TpuChip):
        raise UnsupportedError(f"no numbers of a TPU's cores for {spec.name}")
    return chip
