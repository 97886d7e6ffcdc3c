"""The stage under compile-only targets: TPUs through libtpu, the H200 by topology.

Kernels compile for real here (layouts, VMEM, ptxas); nothing runs.
"""

import importlib.util
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hlo_tools
from hlo_tools.targets import Target

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


def test_h200(shared_dir):
    plugins = importlib.util.find_spec("jax_plugins")
    if not plugins or not importlib.util.find_spec("jax_plugins.xla_cuda13"):
        pytest.skip("no CUDA plugin: pip install 'hlo-tools[cuda]'")
    # in a process of its own: the plugin, once loaded, stays
    topology = str(shared_dir / "targets/h200_topology.bin")
    program = (
        "import test_compile_only as t; from hlo_tools.targets import Target;"
        f"target = Target.topology('h200', {topology!r});"
        "report, text = t.compile_for(target.devices[:1]); site, = report.sites;"
        "print(report.target, site.status, site.implementation);"
        "print('__cudnn$fmha' in text)"
    )
    folder = os.path.dirname(__file__)
    paths = os.pathsep.join([folder, os.path.dirname(folder)])
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["h200", "bound", "cudnn", "True"]
