"""A failing case as a script that needs nothing of the fuzz suite."""

from __future__ import annotations

import numpy as np
from fuzz_case import Case
from fuzz_check import lowered

_SCRIPT = '''\
"""{case}

{wrong}
"""

import ml_dtypes  # noqa: F401  its dtypes have names in numpy then
import numpy as np

import jax
from hlo_tools import StableHloModule, binding
from hlo_tools.driver import run_passes
from hlo_tools.targets import Target
from hlo_tools.verify import run_text

binding.FASTER = float("inf")  # bind whatever can be bound
BEFORE = r"""
{text}
"""
INPUTS = [
{inputs}
]

module, report = run_passes(
    StableHloModule.parse(BEFORE), "default", Target.parse("cpu")
)
print(report.text())
with jax.enable_x64({x64}):
    before = run_text(BEFORE, INPUTS, "cpu")
    after = run_text(module.as_text(), INPUTS, "cpu")
for one, two in zip(before, after, strict=True):
    one, two = one.astype(np.float64), two.astype(np.float64)
    print(one.shape, "largest difference", np.abs(one - two).max(), "of",
          np.abs(one).max())
'''


def _literal(array: np.ndarray) -> str:
    # float64 holds every value of the narrower types.
    wide = array if array.dtype.kind in "bi" else array.astype(np.float64)
    return f"    np.array({wide.tolist()}, {str(array.dtype)!r}),"


def reproducer(case: Case, wrong: str) -> str:
    """Returns a Python script with the program and the inputs of a case.

    Args:
      case: the case.
      wrong: what was found, for the script's docstring.
    """
    text, inputs = lowered(case)
    return _SCRIPT.format(
        case=case,
        wrong=wrong,
        text=text.strip(),
        inputs="\n".join(_literal(x) for x in inputs),
        x64=case.dtype == "float64",
    )
