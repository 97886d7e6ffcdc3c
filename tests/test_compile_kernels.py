"""Every kernel of ours, compiled for every device it is for; nothing runs.

Mosaic and ptxas see the kernels here: layouts, VMEM, shared memory and registers.
`make test-compile` runs this file and prints (kernel, target) -> outcome at the end.
A kernel is a row of `KERNELS`; a family of `pallas_kernels.families` is one by itself.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from attention_sites import biased, make_spec
from jax.sharding import SingleDeviceSharding

from hlo_tools.composites import AttentionSpec
from hlo_tools.errors import UnsupportedError
from hlo_tools.gradients import GradSpec
from hlo_tools.targets import TPU_TOPOLOGIES, Target
from pallas_kernels.families import FAMILIES, load_family
from pallas_kernels.tuning import ConfigSelector

pytestmark = pytest.mark.compile_kernels

TARGETS = {"tpu": tuple(TPU_TOPOLOGIES), "gpu": ("h200",)}
MARKS = {"tpu": 'custom_call_target="tpu_custom_call"', "gpu": "mosaic_gpu"}
# File of the topology of a GPU, in the data folder.
TOPOLOGIES = {"h200": "targets/h200_topology.bin"}
# (kernel, target) that may be refused -> a part of the reason
REFUSALS: dict[tuple[str, str], str] = {}

Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its inputs' shapes


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What to compile.

    Attributes:
      platform: "tpu" or "gpu".
      call: of the target: the function and `jax.ShapeDtypeStruct`s, or raises
        UnsupportedError.
      module: that has the kernel; the row is skipped while there is none.
    """

    platform: str
    call: Callable[[Target], Call]
    module: str


def site_shapes(spec: AttentionSpec) -> list[jax.ShapeDtypeStruct]:
    sizes = [(spec.q_len, spec.heads, spec.head_dim)]
    sizes += [(spec.k_len, spec.kv_heads, d) for d in (spec.head_dim, spec.value_dim)]
    q, k, v = (
        jax.ShapeDtypeStruct((spec.batch, *size), spec.q_dtype) for size in sizes
    )
    return [q, k, v, *(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in spec.sides)]


def site(**fields) -> AttentionSpec:
    sizes = {"b": 1, "t": 256, "s": 256, "k": 2, "g": 2, "d": 128}
    return make_spec(**{**sizes, "dtype": "bfloat16", **fields})


def tpu_forward(kernel: str, spec: AttentionSpec, target: Target) -> Call:
    from pallas_kernels.attention import tpu

    reason = tpu.IMPLEMENTATION.supports(spec, target)
    if reason is not None:
        raise UnsupportedError(reason)
    assert tpu.make_plan(spec).kernel == kernel
    return tpu.IMPLEMENTATION.build(spec, target), tuple(site_shapes(spec))


def tpu_grad(spec: AttentionSpec, target: Target) -> Call:
    from pallas_kernels.attention import tpu_grad

    wanted = ("q", "k", "v")
    grad = GradSpec(wanted, (spec.q_dtype,) * 3, spec.out_dtype)
    reason = tpu_grad.GRAD.supports(spec, grad, target)
    if reason is not None:
        raise UnsupportedError(reason)
    forward, backward = tpu_grad.GRAD.build(spec, grad, target)

    def both(dout, *inputs):
        out, *residuals = forward(*inputs)
        return out, backward(*inputs, out, *residuals, dout)

    shape = (spec.batch, spec.q_len, spec.heads, spec.value_dim)
    dout = jax.ShapeDtypeStruct(shape, spec.out_dtype)
    return both, (dout, *site_shapes(spec))


def family_kernel(name: str, target: Target) -> Call:
    """The smallest preset, with the configuration that the selector picks."""
    family = load_family(name)
    problem = family.presets["small"]()[-1]
    config = ConfigSelector(family, target).select(problem).config
    inputs = functools.partial(family.make_inputs, problem, 0)
    return family.run(problem, config), jax.eval_shape(inputs)


KERNELS: dict[str, Kernel] = {
    "tpu splash": Kernel(
        "tpu",
        functools.partial(tpu_forward, "splash", site(causal=True, softcap=30.0)),
        "pallas_kernels.attention.tpu",
    ),
    "tpu flash": Kernel(
        "tpu",
        functools.partial(
            tpu_forward, "flash", site(**biased(1, 2, 2, 256, 256, dtype="float32"))
        ),
        "pallas_kernels.attention.tpu",
    ),
    "tpu grad": Kernel(
        "tpu",
        functools.partial(tpu_grad, site(causal=True)),
        "pallas_kernels.attention.tpu_grad",
    ),
    **{
        name: Kernel("gpu", functools.partial(family_kernel, name), module)
        for name, module in {
            "attention-forward": "pallas_kernels.attention.gpu_forward",
            "attention-backward": "pallas_kernels.attention.gpu_backward",
        }.items()
    },
}
PAIRS = [(name, t) for name, row in KERNELS.items() for t in TARGETS[row.platform]]


def compile_pair(name: str, target: Target) -> str:
    """Compiles; returns "ok", or "refused: " and the reason."""
    row = KERNELS[name]
    assert target.devices is not None
    on_device = SingleDeviceSharding(target.devices[0])
    try:
        fn, shapes = row.call(target)
    except UnsupportedError as error:
        return f"refused: {error}"
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device), shapes
    )
    platform = {"tpu": "tpu", "gpu": "cuda"}[row.platform]
    lowered = jax.jit(fn).trace(*shapes).lower(lowering_platforms=(platform,))
    assert MARKS[row.platform] in (lowered.compile().as_text() or "")
    return "ok"


def missing(name: str, target: str) -> str | None:
    """Why a pair can not be compiled here, or None."""
    row = KERNELS[name]
    if importlib.util.find_spec(row.module) is None:
        return f"there is no {row.module} yet"
    if row.platform == "tpu":
        found = importlib.util.find_spec("libtpu")
        return None if found else "no libtpu: pip install 'hlo-tools[tpu]'"
    plugins = importlib.util.find_spec("jax_plugins")
    if not plugins or not importlib.util.find_spec("jax_plugins.xla_cuda13"):
        return "no CUDA plugin: pip install 'hlo-tools[cuda]'"
    return None


def in_own_process(name: str, target: str, topology: Path) -> str:
    """`compile_pair` where the CUDA plugin may be loaded; once loaded, it stays."""
    program = (
        "import json, test_compile_kernels as t; from hlo_tools.targets import Target;"
        f"target = Target.topology({target!r}, {str(topology)!r});"
        f"print(json.dumps(t.compile_pair({name!r}, target)))"
    )
    folder = Path(__file__).parent
    paths = os.pathsep.join([str(folder), str(folder.parent)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_compiles(name: str, target: str, request, record_property) -> None:
    def outcome(text: str) -> str:
        record_property("compiled", (name, target, text))
        return text

    reason, folder = missing(name, target), Path()
    if reason is None and target in TOPOLOGIES:
        try:
            folder = request.getfixturevalue("shared_dir")
        except pytest.skip.Exception as error:
            reason = str(error)
    if reason is not None:
        pytest.skip(outcome(f"skipped: {reason}").removeprefix("skipped: "))
    outcome("failed")  # unless something better follows
    if target in TOPOLOGIES:
        found = in_own_process(name, target, folder / TOPOLOGIES[target])
    else:
        found = compile_pair(name, Target.topology(target))
    outcome(found)
    if (name, target) in REFUSALS:
        assert REFUSALS[name, target] in found, "refused for another reason, or not"
    else:
        assert found == "ok"


def test_every_family_is_compiled() -> None:
    assert set(FAMILIES) <= set(KERNELS)
    assert set(REFUSALS) <= set(PAIRS)
