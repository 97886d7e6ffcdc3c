"""The table of cores against the table of devices: one must give the other's rates."""

import dataclasses

import pytest

from hlo_tools.chips import CHIPS, GpuChip, TpuChip, gpu_chip, tpu_chip
from hlo_tools.errors import UnsupportedError
from hlo_tools.targets import DEVICE_SPECS


def test_every_accelerator_has_a_row() -> None:
    assert set(CHIPS) == set(DEVICE_SPECS) - {"cpu"}


@pytest.mark.parametrize("name", CHIPS)
def test_every_number_has_a_source(name: str) -> None:
    chip = CHIPS[name]
    numbers = {field.name for field in dataclasses.fields(chip)} - {"sources"}
    assert set(chip.sources) == numbers
    assert all(chip.sources.values())


@pytest.mark.parametrize("name", CHIPS)
def test_cores_give_the_datasheets_matmul_rate(name: str) -> None:
    chip, spec = CHIPS[name], DEVICE_SPECS[name]
    if isinstance(chip, GpuChip):
        rate = chip.cores * chip.clock * chip.matmul_flops
    else:
        flops = chip.cores * chip.mxus * 2 * chip.mxu_size**2
        if chip.clock is None:
            # no silicon of these generations is known to run at 3 GHz
            assert spec.matmul_flops["bfloat16"] / flops > 3e9
            return
        rate = flops * chip.clock
    assert rate == pytest.approx(spec.matmul_flops["bfloat16"], rel=0.005)


@pytest.mark.parametrize("name", CHIPS)
def test_lookup_by_platform(name: str) -> None:
    spec = DEVICE_SPECS[name]
    if spec.platform == "gpu":
        chip = gpu_chip(spec)
        assert chip.smem_per_block < chip.smem_per_core
        assert chip.l2_bandwidth > spec.memory_bandwidth
        with pytest.raises(UnsupportedError, match=name):
            tpu_chip(spec)
    else:
        assert isinstance(tpu_chip(spec), TpuChip)
        with pytest.raises(UnsupportedError, match=name):
            gpu_chip(spec)
