"""The table of kernels with choices; a row is loaded when it is asked for."""

from __future__ import annotations

import importlib

from hlo_tools.errors import UnknownNameError
from pallas_kernels.kernel import KernelFamily

# name -> "module:attribute" of a KernelFamily of that name
FAMILIES: dict[str, str] = {
    "attention-forward": "pallas_kernels.attention.gpu_family:FORWARD",
    "attention-backward": "pallas_kernels.attention.gpu_family:BACKWARD",
}


def load_family(name: str) -> KernelFamily:
    """Returns a row's family.

    Args:
      name: of the row.

    Raises:
      UnknownNameError: there is none; names the closest.
    """
    if name not in FAMILIES:
        raise UnknownNameError("kernel family", name, FAMILIES)
    return family_at(FAMILIES[name])


def family_at(place: str) -> KernelFamily:
    """Returns the family at "module:attribute"."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
