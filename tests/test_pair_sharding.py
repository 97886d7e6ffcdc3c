"""Training steps under meshes: bound, with the original's collectives and results."""

import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from collectives import Collective, collectives
from sharded_steps import LanguageModel, make_mesh, sharded_step

import hlo_tools
from hlo_tools import StableHloModule, binding
from hlo_tools.driver import run_passes
from hlo_tools.targets import Target

MESHES = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tensor of 4": {"tensor": 4},
    "tensor": {"tensor": 8},
    "data, tensor": {"data": 2, "tensor": 4},
    "fsdp, tensor": {"fsdp": 4, "tensor": 2},
    "data, fsdp, tensor": {"data": 2, "fsdp": 2, "tensor": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flat": {"flat": True},
    "grouped": {"kv_heads": 4, "flat": True},
    "slopes": {"bias": "slopes"},
    "table": {"bias": "table"},
    "scan": {"scan": True},
    "scan, table": {"scan": True, "bias": "table"},
    "remat": {"remat": True},
    "scan, remat": {"scan": True, "remat": True},
    "padding": {"padding": True},
}
# The fast part: all axes at once, and scanned layers with a bias.
FAST = {("plain", "data, fsdp, tensor"), ("scan, table", "fsdp, tensor")}
CASES = [
    pytest.param(
        variant,
        mesh,
        id=f"{variant}-{mesh}",
        marks=() if (variant, mesh) in FAST else pytest.mark.slow,
    )
    for variant in VARIANTS
    for mesh in MESHES
    # four key-value heads on eight devices are among the refused ones below
    if not (variant == "grouped" and mesh == "tensor")
]


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr("hlo_tools.binding.FASTER", float("inf"))


class Compiled:
    """A training step, compiled as it is and rewritten."""

    def __init__(self, model: LanguageModel, axes: dict[str, int]):
        mesh = make_mesh(**axes)
        self.arguments, out = sharded_step(model, mesh)
        ours = hlo_tools.jit(model.step, out_shardings=out)
        with jax.set_mesh(mesh):
            plain = jax.jit(model.step, out_shardings=out).lower(*self.arguments)
            self.before = plain.compile()
            self.after = ours.lower(*self.arguments).compile()
        self.sites = ours.report().sites

    def assert_bound(self, gradients: int = 2):
        for site in self.sites:
            assert site.status == "bound", site.reason
            assert site.implementation == "online"
        found = [site for site in self.sites if site.gradient_bound]
        assert len(found) == gradients

    def assert_same_results(self):
        old = self.arguments[0]
        got, want = self.after(*self.arguments), self.before(*self.arguments)
        np.testing.assert_allclose(float(got[0]), float(want[0]), rtol=2e-6)
        leaves = zip(*map(jax.tree.leaves, (old, got[1], want[1])), strict=True)
        for start, ours, theirs in leaves:
            # what the step changed, so that a wrong gradient is not lost in the sum
            change = np.asarray(theirs) - np.asarray(start)
            largest = np.abs(change).max()
            assert largest > 1e-2
            error = np.abs(np.asarray(ours) - np.asarray(theirs)).max()
            assert error <= 2e-5 * largest + 2e-6

    def counts(self) -> tuple[Counter[Collective], Counter[Collective]]:
        texts = [one.as_text() or "" for one in (self.before, self.after)]
        return collectives(texts[0]), collectives(texts[1])


@pytest.mark.parametrize(("variant", "mesh"), CASES)
def test_training_step(variant, mesh):
    compiled = Compiled(LanguageModel(**VARIANTS[variant]), MESHES[mesh])
    # with jax.checkpoint, the first forward pass of each is bound alone
    compiled.assert_bound(1 if "scan" in variant else 2)
    compiled.assert_same_results()
    before, after = compiled.counts()
    assert before
    if variant == "slopes":
        # The program adds up [H,T,T] over the batch and then distances; the kernel
        # adds up what is left per head. Everything else is the same.
        before, after = (
            Counter(map(without_scores, c.elements())) for c in (before, after)
        )
    assert after == before


def without_scores(one: Collective) -> Collective:
    shape = re.sub(r"\[(\d+),32,32\]", r"[\1]", one.shape)
    shape = re.sub(r"\[32,32\]", "[]", shape)
    return Collective(one.op, shape, one.groups, one.dimensions, one.loops)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "fewer key-value heads than devices": (
        {"kv_heads": 2, "flat": True},
        {"tensor": 4},
        "number of key-value heads (2) can not be split into 4 parts",
    ),
    "one key-value head": (
        {"kv_heads": 1, "flat": True},
        {"data": 2, "tensor": 4},
        "query head group (8) is split over mesh axis tensor",
    ),
    "activations without a constraint": (
        {"constrain": False},
        {"fsdp": 8},
        "conflicting shardings",
    ),
    "the same on three axes": (
        {"constrain": False, "bias": "table"},
        {"data": 2, "fsdp": 2, "tensor": 2},
        "conflicting shardings",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    keywords, axes, reason = REFUSED[name]
    compiled = Compiled(LanguageModel(**keywords), axes)
    assert len(compiled.sites) == 2
    for site in compiled.sites:
        assert site.status == "inlined"
        assert reason in site.reason
    before, after = compiled.counts()
    assert after == before


def lowered_text(model: LanguageModel, axes: dict[str, int]) -> str:
    mesh = make_mesh(**axes)
    arguments, out = sharded_step(model, mesh)
    with jax.set_mesh(mesh):
        return jax.jit(model.step, out_shardings=out).lower(*arguments).as_text()


def test_meshes_of_one_process_do_not_share_functions():
    """Equal descriptions, other sizes."""
    model = LanguageModel()
    for size in (2, 4, 8):
        compiled = Compiled(model, {"tensor": size})
        compiled.assert_bound()
        compiled.assert_same_results()


def test_a_mesh_of_another_name():
    text = lowered_text(LanguageModel(), MESHES["data, tensor"])
    assert "sdy.mesh @mesh " in text
    text = re.sub(r"@mesh\b", "@devices", text)
    module, report = run_passes(
        StableHloModule.parse(text), "default", Target.parse("cpu")
    )
    module.verify()
    assert [site.status for site in report.sites] == ["bound", "bound"]
    assert module.as_text().count("sdy.mesh @") == 1


def test_passes_run_under_a_mesh_of_the_caller():
    text = lowered_text(LanguageModel(), MESHES["data"])
    with jax.set_mesh(make_mesh(data=4)):
        module, report = run_passes(
            StableHloModule.parse(text), "default", Target.parse("cpu")
        )
    module.verify()
    assert [site.status for site in report.sites] == ["bound", "bound"]


# implementation -> what its calls are in a module
KERNELS = {"cudnn": "__cudnn$fmha", "mosaic-gpu": "@mosaic_gpu"}


@pytest.mark.parametrize("mesh", ["data", "data, fsdp, tensor"])
@pytest.mark.parametrize("variant", ["plain", "scan", "grouped", "padding"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_lowers_for_h200(kernel, variant, mesh, monkeypatch):
    row = binding.load_implementations("hlo_tools.attention")[kernel]
    monkeypatch.setattr(binding, "load_implementations", lambda _: {kernel: row})
    keywords = {**VARIANTS[variant], "length": 128, "head_dim": 64}
    model = LanguageModel(**keywords, dtype="bfloat16")
    text = lowered_text(model, MESHES[mesh])
    module, report = run_passes(
        StableHloModule.parse(text), "default", Target.parse("h200")
    )
    module.verify()
    assert len(report.sites) == (1 if variant == "scan" else 2)
    for site in report.sites:
        assert site.status == "bound", site.reason
        assert site.implementation == kernel
        assert site.config["shard_map"]
    functions = {n: str(f.operation.get_asm()) for n, f in module.functions().items()}
    with_kernel = [n for n, asm in functions.items() if KERNELS[kernel] in asm]
    assert len(with_kernel) == 2  # both halves
    for name in with_kernel:  # each device calls it on its own part
        assert functions[name].count("sdy.manual_computation") == 1
        before, _, inside = functions[name].partition("sdy.manual_computation")
        assert KERNELS[kernel] in inside
        assert KERNELS[kernel] not in before
    after = module.as_text()
    for collective in ("all_reduce", "all_gather", "all_to_all", "collective_permute"):
        assert after.count(f"stablehlo.{collective}") == text.count(
            f"stablehlo.{collective}"
        )


EXAMPLE = """\
HloModule m

%body (p: (f32[4])) -> (f32[4]) {
  %ar = f32[4]{0} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (f32[4]{0}) while(%t), condition=%cond, body=%body
  %t2 = (f32[8,1]{1,0}, /*index=1*/bf16[]) all-reduce(%a, %b), MESH, to_apply=%add
  %g = (f32[2], f32[16]) all-gather-start(%a), GROUPS, dimensions={0}
  %d = f32[16]{0} all-gather-done(%g)
  %p = f32[2]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}
}
""".replace("MESH", "replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}").replace(
    "GROUPS", "replica_groups={{0,1},{2,3}}"
)


def test_reading_of_collectives():
    minor = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert collectives(EXAMPLE) == Counter(
        [
            Collective("all-reduce", "f32[4]", ((0, 4), (1, 5), (2, 6), (3, 7)), "", 1),
            Collective("all-reduce", "f32[8]", minor, "", 0),
            Collective("all-reduce", "bf16[]", minor, "", 0),
            Collective("all-gather", "f32[16]", ((0, 1), (2, 3)), "0", 0),
            Collective("collective-permute", "f32[2]", ((0, 1), (1, 0)), "", 0),
        ]
    )
