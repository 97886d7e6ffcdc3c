"""The stage under compile-only targets: TPUs through libtpu, the H200 by topology.

Kernels compile for real here (layouts, VMEM, ptxas); nothing runs.
"""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_sites import biased, make_spec, masked
from cuda_python import MISSING, cuda_python, run_with_cuda
from gradient_sites import QKV, half_bias
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import hlo_tools
from hlo_tools.gradients import GradSpec
from hlo_tools.targets import Target
from pallas_kernels.attention import cudnn_grad, gpu_binding

B, T, H, D = 4, 1024, 8, 128

requires_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install 'hlo-tools[tpu]'",
)


def attention(q, k, v):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(D)
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e30)
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def compile_for(devices):
    """Compiles the attention, split over the devices; returns (report, text)."""
    mesh = Mesh(np.array(devices), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((B, T, H, D), jnp.bfloat16, sharding=sharding)
    fn = hlo_tools.jit(lambda q, k, v: attention(q, k, v))
    compiled = fn.lower(x, x, x).compile()
    return fn.report(), compiled.as_text()


@requires_libtpu
@pytest.mark.parametrize("name", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("chips", [1, 4])
def test_tpu(name, chips):
    target = Target.topology(name)
    assert target.devices is not None
    report, text = compile_for(target.devices[:chips])
    (site,) = report.sites
    assert report.target == name
    assert site.status == "bound", site.reason
    assert site.implementation == "tpu-flash"
    assert "tpu_custom_call" in text
    assert not re.search(r"= \S+ (all-gather|all-reduce|all-to-all)", text)


# name -> (keywords of make_spec, whether the first side's gradient is wanted): what
# XLA has to accept; cuDNN itself sees the calls on a GPU only
CUDNN_GRAD_CALLS: dict[str, tuple[dict, bool]] = {
    "full": ({"d": 64}, False),
    "causal": ({"d": 128, "causal": True}, False),
    "grouped": ({"causal": True, "k": 2, "g": 4}, False),
    "window": ({"causal": True, "window": (63, 0)}, False),
    "more keys": ({"causal": True, "t": 128}, False),
    "keys cut off": ({"causal": True, "t": 64, "offset": 100}, False),
    "mask": (masked(2, 1, 1, 256, 256, rows_never_empty=False), False),
    "float32 bias": (biased(1, 4, 1, 256, 256), False),
    "dbias": (half_bias(2, 4, 1, 256, 256), True),
    "dbias of heads": (half_bias(1, 4, 1, 256, 256, causal=True), True),
}


# The same for our own kernels; ptxas sees them here.
KERNEL_GRAD_CALLS: dict[str, tuple[dict, bool]] = {
    "causal": ({"d": 128, "causal": True}, False),
    "grouped": ({"causal": True, "k": 2, "g": 4}, False),
    "softcap, odd lengths": ({"softcap": 30.0, "t": 201, "s": 333, "d": 72}, False),
    "mask": (masked(2, 1, 1, 256, 256, rows_never_empty=False), False),
    "dbias of heads": (half_bias(1, 4, 1, 256, 256, causal=True), True),
    "dbias of keys": (half_bias(2, 1, 1, 1, 256), True),
}
# implementation -> (gradients, calls, their mark in the compiled text)
GRADIENTS = {
    "cudnn": (cudnn_grad.GRAD, CUDNN_GRAD_CALLS, "__cudnn$fmha"),
    "mosaic-gpu": (gpu_binding.GRAD, KERNEL_GRAD_CALLS, "mosaic_gpu"),
}


def compile_gradients(device, implementation: str) -> None:
    """Compiles all calls of a row of `GRADIENTS`, both halves in one program."""
    run, calls, mark = GRADIENTS[implementation]
    target = Target.from_devices([device])
    on_device = SingleDeviceSharding(device)
    for name, (keywords, wants_dbias) in calls.items():
        sizes = {"t": 256, "s": 256, "k": 4, "g": 1, "d": 64, "dtype": "bfloat16"}
        spec = make_spec(**{**sizes, **keywords})
        wanted = (0, *QKV) if wants_dbias else QKV
        grad = GradSpec(wanted, ("bfloat16",) * len(wanted), "bfloat16")
        assert run.supports(spec, grad, target) is None, name
        forward, backward = run.build(spec, grad, target)

        def both(dout, *inputs, forward=forward, backward=backward):
            out, *residuals = forward(*inputs)
            return out, backward(*inputs, out, *residuals, dout)

        q, k, v = (
            jax.ShapeDtypeStruct((2, n, h, spec.head_dim), jnp.bfloat16)
            for n, h in ((spec.q_len, spec.heads), *[(spec.k_len, spec.kv_heads)] * 2)
        )
        shapes = [q, q, k, v, *spec.sides]  # the first is dout
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device) for x in shapes
        ]
        traced = jax.jit(both).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
        count = text.count(f'custom_call_target="{mark}')
        print(name.replace(" ", "-"), count)


def run_on_h200_topology(shared_dir, statements: str) -> str:
    """Runs statements in a process of their own: the plugin, once loaded, stays."""
    if cuda_python() is None:
        pytest.skip(MISSING)
    topology = str(shared_dir / "targets/h200_topology.bin")
    program = (
        "import sys; import test_compile_only as t;"
        "from hlo_tools.targets import Target;"
        "target = Target.topology('h200', sys.argv[1]);" + statements
    )
    return run_with_cuda(program, topology)


def test_h200(shared_dir):
    output = run_on_h200_topology(
        shared_dir,
        "report, text = t.compile_for(target.devices[:1]); site, = report.sites;"
        "print(report.target, site.status, site.implementation);"
        "print(text.count('custom_call_target=\"mosaic_gpu'))",
    )
    assert output.split() == ["h200", "bound", "mosaic-gpu", "1"]


@pytest.mark.parametrize("implementation", GRADIENTS)
def test_h200_gradients(shared_dir, implementation):
    output = run_on_h200_topology(
        shared_dir, f"t.compile_gradients(target.devices[0], {implementation!r})"
    )
    rows = dict(line.split() for line in output.splitlines())
    calls = GRADIENTS[implementation][1]
    assert rows == {name.replace(" ", "-"): "2" for name in calls}
