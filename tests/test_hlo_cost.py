"""`hlo_tools.hlo.cost` against XLA's own analysis of the compiled program."""

import json

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
import pytest

from hlo_tools import hlo
from hlo_tools.cli import main
from hlo_tools.hlo.cost import analyze
from hlo_tools.targets import Target

SLOW = pytest.mark.slow
# XLA's FLOPs and ours; exact in nearly all modules.
LIMIT = 0.02


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def convolution(x, w):
    return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME")


def looped(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, 7)[0]


def branches(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x @ x @ x, x)


# name -> function and shapes
PROGRAMS = {
    "matmul": (lambda x, w: x @ w, (f32(8, 16), f32(16, 32))),
    "batched": (
        lambda x, w: jnp.einsum("bij,bjk->bik", x, w), (f32(3, 4, 5), f32(3, 5, 2)),
    ),
    "softmax": (jax.nn.softmax, (f32(16, 40),)),
    "mean": (lambda x: x.mean(0), (f32(17, 9),)),
    "convolution": (convolution, (f32(2, 3, 15, 14), f32(6, 3, 3, 5))),
    "convolution, backward": (
        jax.grad(lambda x, w: convolution(x, w).sum(), (0, 1)),
        (f32(2, 3, 15, 14), f32(6, 3, 3, 5)),
    ),
    "pooling": (
        lambda x: jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 3, 3), (1, 2, 2), "VALID"
        ),
        (f32(2, 13, 12),),
    ),
    "cumulative": (lambda x: jnp.cumsum(x, 1), (f32(4, 20),)),
    "scatter": (lambda x, y: x.at[jnp.array([1, 3, 1])].add(y), (f32(8, 6), f32(3, 6))),
    "loop": (looped, (f32(4, 8), f32(8, 8))),
    "gradient of a loop": (
        jax.grad(lambda x, w: looped(x, w).sum(), 1), (f32(4, 8), f32(8, 8)),
    ),
    "branches": (branches, (f32(6, 6),)),
    "integers": (lambda x: (x.astype(int) * 3 + 1).sum(), (f32(30),)),
}  # fmt: skip


def assert_flops(text: str, analysis) -> None:
    mine = analyze(hlo.parse(text)).total_once
    theirs = analysis.get("flops", 0.0)
    assert mine.flops == pytest.approx(theirs, rel=LIMIT, abs=2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_flops_are_xlas(name: str) -> None:
    function, shapes = PROGRAMS[name]
    compiled = jax.jit(function).lower(*shapes).compile()
    assert_flops(compiled.as_text(), compiled.cost_analysis())


ZOO_STEP = 38  # every so many of the modules in the fast tests


@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=SLOW)])
def test_zoo(shared_dir, part: str) -> None:
    client = jax.extend.backend.get_backend("cpu")
    device = jax.devices("cpu")[0]
    files = sorted((shared_dir / "zoo").glob("*.mlir"))
    files = files[::ZOO_STEP] if part == "some" else files
    assert len(files) >= 5
    for file in files:
        program = client.compile_and_load(file.read_text(), [device])
        (module,) = program.hlo_modules()
        assert_flops(module.to_string(), program.cost_analysis())


def test_loops_count_their_trips() -> None:
    text = jax.jit(looped).lower(f32(4, 8), f32(8, 8)).compile().as_text()
    found = analyze(hlo.parse(text), Target.parse("h200"))
    once = 2 * 4 * 8 * 8
    assert found.total.flops >= 7 * once
    assert found.total_once.flops < 2 * once
    assert {row.trips for row in found.instructions} >= {7}
    assert found.total.seconds > 0


def test_collectives() -> None:
    text = """HloModule m, num_partitions=8

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main {
  x = f32[16,4]{1,0} parameter(0)
  ROOT y = f32[16,4]{1,0} all-reduce(x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=add
}
"""  # noqa: E501
    (found,) = analyze(hlo.parse(text)).collectives
    assert (found.opcode, found.bytes) == ("all-reduce", 16 * 4 * 4)
    assert (found.group_count, found.group_size) == (2, 4)


def test_command(tmp_path, capsys) -> None:
    path = tmp_path / "m.txt"
    lowered = jax.jit(lambda x: x @ x).lower(np.ones((64, 64), np.float32))
    path.write_text(lowered.compile().as_text())
    assert main(["cost", str(path), "--target", "h200"]) == 0
    assert "roofline of h200" in capsys.readouterr().out
    assert main(["cost", str(path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["cost", str(path), "--target", "h2000"]) == 2
