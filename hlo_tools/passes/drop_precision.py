"""drop-precision: removes reduce_precision to the type's own format.

`jax.checkpoint` puts one behind each value that its policy saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jax.extend.mlir import ir

from hlo_tools.matching.reader import dtype_of
from hlo_tools.module import StableHloModule
from hlo_tools.pipeline import PassContext

_NAME = "stablehlo.reduce_precision"
# (exponent bits, mantissa bits)
_FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


@dataclass(frozen=True)
class DropPrecision:
    """Removes `reduce_precision` operations that round to what is there already."""

    name: ClassVar[str] = "drop-precision"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "remove reduce_precision to the type's own format"

    def run(self, module: StableHloModule, context: PassContext) -> bool:
        changed = False
        for op in module.walk(_NAME):
            bits = [
                ir.IntegerAttr(op.attributes[name]).value
                for name in ("exponent_bits", "mantissa_bits")
            ]
            own = _FORMATS.get(dtype_of(op.operands[0]))
            if own is not None and bits[0] >= own[0] and bits[1] >= own[1]:
                op.results[0].replace_all_uses_with(op.operands[0])
                op.operation.erase()
                changed = True
        return changed
