"""Kernels that ``hlo_tools`` binds to: a reference and one file per backend.

The package may import the core of ``hlo_tools`` and never ``sharding``.
``hlo_tools`` reaches it through table rows only, loaded on demand.
"""

from pallas_kernels.attention.api import attention

__all__ = ["attention"]
