"""inline-composites: puts the original operations of unbound sites back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jax.extend.mlir import ir

from hlo_tools.inlining import inline_composites
from hlo_tools.module import StableHloModule
from hlo_tools.pipeline import PassContext


@dataclass(frozen=True)
class InlineComposites:
    """Undoes every outlined site that no kernel was bound to.

    Options:
      prefix: composites whose names start with this are inlined.
    """

    name: ClassVar[str] = "inline-composites"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "inline the decomposition of composites left unbound"

    prefix: str = "hlo_tools."

    def run(self, module: StableHloModule, context: PassContext) -> bool:
        def wanted(op: ir.Operation) -> bool:
            return ir.StringAttr(op.attributes["name"]).value.startswith(self.prefix)

        count = inline_composites(module, wanted)
        for site in context.report.sites:
            if site.status == "outlined":
                site.status = "inlined"
                if not context.allows("reassociating"):
                    site.reason = f"exactness {context.exactness!r} allows no kernel"
        return count > 0
