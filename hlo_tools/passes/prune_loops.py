"""prune-loops: drops values that loops carry for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hlo_tools import loops
from hlo_tools.module import StableHloModule
from hlo_tools.pipeline import PassContext
from hlo_tools.rewriting import walk


@dataclass(frozen=True)
class PruneLoops:
    """Removes carried values of while loops that nothing needs.

    Once an attention and its backward pass inside of loops over layers are bound,
    nothing reads the probabilities that the forward loop saves.
    """

    name: ClassVar[str] = "prune-loops"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "drop values that loops carry for nothing"

    def run(self, module: StableHloModule, context: PassContext) -> bool:
        changed_any = False
        while True:
            changed = False
            # a loop that uses the results of another stands below it
            for loop in reversed(walk(module.module.operation, (loops.WHILE,))):
                operation = loop.operation
                gone = loops.unused_values(operation)
                if gone and len(gone) < len(operation.results):
                    count = len(operation.results)
                    loops.rebuild(operation, [n for n in range(count) if n not in gone])
                    changed = True
                    break
            changed_any |= changed
            if not changed:
                return changed_any
            for function in module.functions().values():
                for block in function.regions[0].blocks:
                    loops.erase_unused(block)
