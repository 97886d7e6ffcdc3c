"""HLO modules: read them from text, protos and dumps, look at them, compare them.

Public names:
  parse, parse_folder: any form of a module to an `HloModule`.
  read_dump: the compiles in a dump folder, each with its files.
"""

from hlo_tools.hlo.dump_reading import DumpEntry, read_dump
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
    "DumpEntry",
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
    "read_dump",
]
