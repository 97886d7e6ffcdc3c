"""A pre-XLA compiler stage for JAX: find slow patterns, bind fast kernels, say so.

Public names:
  jit: ``jax.jit`` with the stage in front of XLA.
  install, uninstall: the stage for every jit of the process.
  dump: every form that a lowered or compiled function takes, in a folder.
  pattern: a reference to find in programs, and what is to compute it.
  rewrite_text: the same pipeline on the text of a StableHLO module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hlo_tools.version import __version__

if TYPE_CHECKING:
    from hlo_tools.driver import StageConfig, rewrite_text
    from hlo_tools.dumping import dump
    from hlo_tools.errors import HloToolsError
    from hlo_tools.module import StableHloModule
    from hlo_tools.patterns import Pattern, pattern
    from hlo_tools.pipeline import PassPipeline
    from hlo_tools.report import RewriteReport
    from hlo_tools.stage import install, jit, uninstall


# Loaded on first use, so that importing the package does not touch a backend.
_PUBLIC = {
    "HloToolsError": "hlo_tools.errors",
    "PassPipeline": "hlo_tools.pipeline",
    "Pattern": "hlo_tools.patterns",
    "RewriteReport": "hlo_tools.report",
    "StableHloModule": "hlo_tools.module",
    "StageConfig": "hlo_tools.driver",
    "dump": "hlo_tools.dumping",
    "install": "hlo_tools.stage",
    "jit": "hlo_tools.stage",
    "pattern": "hlo_tools.patterns",
    "rewrite_text": "hlo_tools.driver",
    "uninstall": "hlo_tools.stage",
}

__all__ = [
    "HloToolsError",
    "PassPipeline",
    "Pattern",
    "RewriteReport",
    "StableHloModule",
    "StageConfig",
    "__version__",
    "dump",
    "install",
    "jit",
    "pattern",
    "rewrite_text",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hlo_tools' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
