"""A pass of one's own: under 20 lines, a golden file for what it makes of a program.

A package registers the pass by name in its pyproject.toml, and the name then works
wherever a pipeline is named:

    [project.entry-points."hlo_tools.passes"]
    drop-double-negation = "my_package.passes:DropDoubleNegation"
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp

import hlo_tools
from hlo_tools.rewriting import producer
from hlo_tools.testing import assert_golden


@dataclass(frozen=True)
class DropDoubleNegation:
    """Replaces -(-x) by x."""

    name: ClassVar[str] = "drop-double-negation"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "replace -(-x) by x"
    stands_alone: ClassVar[bool] = True  # worth it even where no kernel is bound

    def run(self, module, context) -> bool:
        changed = False
        for op in module.walk("stablehlo.negate"):
            if inner := producer(op.operands[0], "stablehlo.negate"):
                op.results[0].replace_all_uses_with(inner.operands[0])
                changed = True
        return changed


def twice_negated(x):
    return jnp.sin(jnp.negative(-x))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_known_args()
    spec = f"{__name__}:DropDoubleNegation,dce"
    x = jnp.arange(4.0)
    text = jax.jit(twice_negated).lower(x).as_text()
    rewritten = hlo_tools.rewrite_text(text, passes=spec)
    print(rewritten)
    with tempfile.TemporaryDirectory() as folder:
        # In tests: a file beside the test, written by HLO_TOOLS_UPDATE_GOLDEN=1.
        golden = Path(folder) / "twice_negated.mlir"
        assert_golden(rewritten, golden, update=True)
        assert_golden(rewritten, golden)
    same = hlo_tools.jit(twice_negated, passes=spec)(x) == jax.jit(twice_negated)(x)
    print("same values:", bool(same.all()))


if __name__ == "__main__":
    main()
