"""Kernels that ``hlo_tools`` binds to: a reference and one file per backend.

kernel.py says what a kernel with choices is, families.py lists them; tuning.py selects
a configuration, explanation.py shows why; measured.py reads and writes tables of
measured times, which measuring.py makes, timing.py times, scoring.py compares with the
model, and fitting.py fits it to.

The package may import the core of ``hlo_tools`` and never ``sharding``.
``hlo_tools`` reaches it through table rows only, loaded on demand.
"""

from pallas_kernels.attention.api import attention

__all__ = ["attention"]
