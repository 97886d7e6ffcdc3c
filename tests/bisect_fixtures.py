"""What the tests of bisect break on purpose: an implementation, and passes."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlo_tools import binding
from hlo_tools.composites import attention_ref
from hlo_tools.report import SiteReport

COMPOSITE = "hlo_tools.attention"
SCALES = [0.1 + 0.01 * number for number in range(40)]
VICTIMS: list[float] = []  # scales of the sites that go wrong
MODE = "wrong"  # or "nan", "crash"


def attention(q, k, v, scale):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def model(q, k, v, scales=SCALES):
    """Attention sites that differ in their scales, each beside the others."""
    return sum(jnp.sin(attention(q + scale, k, v, scale)) for scale in scales)


def text_of(function, *shape, **options) -> str:
    x = jax.ShapeDtypeStruct(shape or (1, 8, 1, 4), jnp.float32)
    return jax.jit(function).lower(x, x, x, **options).as_text(debug_info=True)


def _build(spec, target):
    def good(*arrays):  # compiles in a fraction of the time that `online` takes
        return attention_ref(spec, *arrays).astype(spec.out_dtype)

    if not any(abs(spec.scale - victim) < 2e-3 for victim in VICTIMS):
        return good
    if MODE == "crash":
        raise RuntimeError("the kernel can not be built")
    factor = jnp.nan if MODE == "nan" else 1.25
    return lambda *args: good(*args) * factor


def broken():
    online = binding.load_implementations(COMPOSITE)["online"]
    seconds = lambda spec, target: 0.5 * online.seconds(spec, target)  # noqa: E731
    return dataclasses.replace(online, name="broken", build=_build, seconds=seconds)


@dataclasses.dataclass(frozen=True)
class SubtractForAdd:
    """A rewrite that looks harmless: the result's addition becomes a subtraction."""

    name: ClassVar[str] = "subtract-for-add"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "wrong on purpose"

    enabled: bool = True

    def run(self, module, context) -> bool:
        results = list(module.main.regions[0].blocks[0].operations)[-1].operands
        op = results[0].owner
        if op.name != "stablehlo.add" or not self.enabled:
            return False
        with ir.InsertionPoint(op), op.location:
            new = stablehlo.subtract(op.operands[0], op.operands[1])
        op.results[0].replace_all_uses_with(new)
        op.erase()
        return True


@dataclasses.dataclass(frozen=True)
class Raise:
    """A pass that fails."""

    name: ClassVar[str] = "raise"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "fails on purpose"

    def run(self, module, context) -> bool:
        raise KeyError("as told")


@dataclasses.dataclass(frozen=True)
class OddExactness(Raise):
    """A pass whose exactness is none of the known ones."""

    exactness: ClassVar[str] = "odd"


def accepts(original: str, candidate: str) -> bool:
    """A check that takes nothing with a subtraction after the last sine."""
    return "stablehlo.subtract" not in candidate.rpartition("stablehlo.sine")[2]


def rejects(original: str, candidate: str) -> bool:
    return False


def attention_default(q, k, v):
    return attention(q, k, v, 0.125)


@dataclasses.dataclass(frozen=True)
class BreakBackward:
    """Breaks the last addition of gradient programs, and reports a bound site."""

    name: ClassVar[str] = "break-backward"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "wrong on purpose, in the backward pass"

    def run(self, module, context) -> bool:
        changed = "gradient" in module.name and SubtractForAdd().run(module, context)
        if changed:  # the stage keeps a program in which nothing is bound
            site = SiteReport("sum.0", "sum", status="bound", implementation="broken")
            context.report.sites.append(site)
        return changed


@dataclasses.dataclass(frozen=True)
class NextKey:
    """Adds one to the program's result."""

    name: ClassVar[str] = "next-key"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "wrong on purpose"

    def run(self, module, context) -> bool:
        last = list(module.main.regions[0].blocks[0].operations)[-1]
        value = last.operands[0]
        kind = ir.RankedTensorType(value.type)
        one = ir.IntegerAttr.get(kind.element_type, 1)
        with ir.InsertionPoint(last), last.location:
            ones = stablehlo.constant(ir.DenseElementsAttr.get_splat(kind, one))
            last.operation.operands[0] = stablehlo.add(value, ones)
        context.report.sites.append(SiteReport("key.0", "key", status="bound"))
        return True
