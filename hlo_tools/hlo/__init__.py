"""HLO modules: read them from text, protos and dumps, look at them, compare them.

Public names:
  parse, parse_folder: any form of a module to an `HloModule`.
"""

from hlo_tools.hlo.ir import (
    HloComputation,
    HloInstruction,
    HloModule,
    async_pairs,
)
from hlo_tools.hlo.parser import HloParseError, HloParseWarning
from hlo_tools.hlo.reading import parse, parse_folder
from hlo_tools.hlo.shapes import Layout, Shape
from hlo_tools.hlo.stack import SourceFrame

__all__ = [
    "HloComputation",
    "HloInstruction",
    "HloModule",
    "HloParseError",
    "HloParseWarning",
    "Layout",
    "Shape",
    "SourceFrame",
    "async_pairs",
    "parse",
    "parse_folder",
]
