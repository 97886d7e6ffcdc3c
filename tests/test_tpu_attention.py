"""The TPU backend of `attention`: interpreted with race detection, and compiled."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attention_cases import CASES, make_case
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from hlo_tools.errors import UnsupportedError
from hlo_tools.targets import Target
from pallas_kernels import attention
from pallas_kernels.attention.tpu_backend import TpuConfig

SLOW = pytest.mark.slow
QUICK_COMPILE = ("all parts", "v5e")
QUICK = ("everything", "bias of queries")


def check(name: str, dtype: str = "float32", **options: Any) -> None:
    """Checks a case in interpret mode, and that no two accesses race."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        make_case(name, dtype).check(implementation="tpu", **options)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in CASES]
)
def test_case(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["causal", "softcap", "bias", "sinks", "everything", "several tiles"]
)
def test_bfloat16(name: str) -> None:
    check(name, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("config", [TpuConfig(128, 256), TpuConfig(256, 128)])
def test_tile_sizes(config: TpuConfig) -> None:
    check("several tiles", config=config)
    check("several tiles, bias of keys", config=config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": jnp.float16}, "takes bfloat16 and float32, not float16"),
        ({"d": 264}, "head dim 264: at most 256"),
        ({"t": 0}, "an operand is empty"),
    ],
)
def test_refuses(fields: dict[str, Any], words: str) -> None:
    sizes = {"t": 4, "d": 8, "dtype": jnp.float32, **fields}
    x = jnp.ones((1, sizes["t"], 1, sizes["d"]), sizes["dtype"])
    with pytest.raises(UnsupportedError, match=f"tpu: {words}"):
        attention(x, x, x, implementation="tpu")


# name -> arguments; a shape stands for an array. Kernels have to fit in VMEM.
COMPILES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "all parts": {
        "causal": True, "softcap": 2.0, "window": (500, None), "segments": True,
        "lengths": True, "mask": (2, 1, 2048, 2048), "bias": (1, 8, 2048, 2048),
        "sinks": (8,),
    },
    "all parts, head dim 256": {
        "softcap": 3.0, "segments": True, "d": 256, "bias": (2, 8, 2048, 2048),
        "mask": (2, 1, 2048, 2048),
    },
    "float32": {"dtype": "float32", "d": 256, "bias": (2, 8, 2048, 2048)},
    "float32, parts of keys": {
        "dtype": "float32", "d": 256, "segments": True, "lengths": True,
        "mask": (2, 1, 1, 2048),
    },
    "odd sizes": {
        "t": 1001, "s": 1999, "mask": (2, 1, 1001, 1), "bias": (2, 1, 1, 1999),
    },
    "bias of queries": {"bias": (1, 8, 2048, 1), "mask": (1, 8, 1, 2048)},
    "bias, one number": {"bias": (1, 1, 1, 1)},
}  # fmt: skip


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) == QUICK_COMPILE else SLOW)
        for name in COMPILES
        for kind in ("v5e", "v6e", "tpu7x")
    ],
)
def test_compiles(name: str, kind: str) -> None:
    row = {"t": 2048, "s": 2048, "d": 128, "dtype": "bfloat16", **COMPILES[name]}
    t, s, d, dtype = (row.pop(key) for key in ("t", "s", "d", "dtype"))
    target = Target.topology(kind)
    assert target.devices is not None
    sharding = SingleDeviceSharding(target.devices[0])

    def array(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    floats = {"q": array(2, t, 8, d), "k": array(2, s, 4, d), "v": array(2, s, 4, d)}
    floats |= {key: array(*row.pop(key)) for key in ("bias", "sinks") if key in row}
    others = {"mask": array(*row.pop("mask"), dtype="bool")} if "mask" in row else {}
    if row.pop("segments", False):
        others["q_segment_ids"] = array(2, t, dtype="int32")
        others["kv_segment_ids"] = array(2, s, dtype="int32")
    if row.pop("lengths", False):
        others |= {key: array(2, dtype="int32") for key in ("q_lengths", "kv_lengths")}

    def loss(floats, others):
        return attention(**floats, **others, **row, implementation="tpu").sum()

    traced = jax.jit(jax.value_and_grad(loss)).trace(floats, others)
    text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    kernels = 3 + ("bias" in floats)
    assert text.count('custom_call_target="tpu_custom_call"') == kernels
