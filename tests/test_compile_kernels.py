"""Every kernel of ours, compiled for every device it is for; nothing runs.

Mosaic and ptxas see the kernels here: layouts, VMEM, shared memory and registers.
`make test-compile` runs this file and prints (kernel, target) -> outcome at the end.
A kernel is a row of `KERNELS`; a family of `pallas_kernels.families` is one by itself.
"""

import dataclasses
import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from attention_sites import biased, make_spec
from cuda_python import MISSING, cuda_python, run_with_cuda
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


def family_kernel(
    name: str, target: Target, changes: dict[str, Any], fields: dict[str, Any]
) -> Call:
    """The smallest preset with other fields, and the selector's pick with others."""
    family = load_family(name)
    problem = dataclasses.replace(family.presets["small"]()[-1], **fields)
    config = ConfigSelector(family, target).select(problem).config
    config = dataclasses.replace(config, **changes)
    inputs = functools.partial(family.make_inputs, problem, 0)
    return family.run(problem, config), jax.eval_shape(inputs)


# What else the Hopper kernels do: name -> other choices, other fields of the problem.
FLAT = {"head_dim": 64, "value_dim": 64}
DEEP = {"head_dim": 256, "value_dim": 256}
SIDES = {"bias": (1, 4, 512, 512), "bias_dtype": "float32", "mask": (1, 1, 512, 512)}
PARTS = {
    "segments": True, "k_lengths": True, "softcap": 30.0, "window": (99, None),
    "dtype": "float16",
}  # fmt: skip
HOPPER: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "attention-forward": {
        "": ({}, {}),
        ", persistent": ({"persistent": True}, {}),
        ", overlap": ({"overlap": True, "block_kv": 64}, {}),
        ", three warpgroups": (
            {"compute_warpgroups": 3, "block_kv": 64}, FLAT,
        ),
        ", head dim 256": ({}, DEEP),
        ", bias and mask": ({}, SIDES),
        ", everything else": ({}, PARTS),
    },
    "attention-backward": {
        "": ({}, {}),
        ", two kernels": ({"two_kernels": True}, {}),
        ", head dim 64": ({}, {**FLAT, "causal": False}),
        ", head dim 256": ({}, DEEP),
        ", head dim 256, two kernels": ({"two_kernels": True}, DEEP),
        ", bias and mask": ({}, SIDES),
        ", everything else": ({}, PARTS),
    },
}  # fmt: skip


def hopper_rows() -> dict[str, Kernel]:
    """The rows of `HOPPER`."""
    return {
        name + what: Kernel(
            "gpu",
            functools.partial(family_kernel, name, changes=changes, fields=fields),
            f"pallas_kernels.attention.gpu_{name.removeprefix('attention-')}",
        )
        for name, rows in HOPPER.items()
        for what, (changes, fields) in rows.items()
    }


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
    **hopper_rows(),
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
    if cuda_python() is None:
        return MISSING
    return None


@functools.cache
def compiled_with_cuda(target: str, topology: Path) -> dict[str, str]:
    """Compiles all rows of `KERNELS` for a GPU, where the CUDA plugin is."""
    program = (
        "import json, sys; import test_compile_kernels as t;"
        "print(json.dumps(t.compile_gpu_rows(*sys.argv[1:])))"
    )
    found = run_with_cuda(program, target, str(topology))
    return json.loads(found.splitlines()[-1])


def compile_gpu_rows(target: str, topology: str) -> dict[str, str]:
    """Returns name -> what `compile_pair` returns, or the error."""
    found = {}
    for name, row in KERNELS.items():
        if row.platform == "gpu":
            try:
                found[name] = compile_pair(name, Target.topology(target, topology))
            except Exception as error:  # of compilers; the other rows go on
                found[name] = f"{type(error).__name__}: {error}"[:3000]
    return found


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
        found = compiled_with_cuda(target, folder / TOPOLOGIES[target])[name]
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
