"""Shapes of HLO values: element type, dimensions, layout, tuples, and their sizes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hlo_tools.hlo import lexer

# Element types whose name does not say their width in bits.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "tuple": 0, "buffer": 0}
_WIDTH = re.compile(r"[a-z]+(\d+)")
KNOWN_ELEMENT_TYPES = frozenset(
    "pred s1 s2 s4 s8 s16 s32 s64 u1 u2 u4 u8 u16 u32 u64 f4e2m1fn f6e2m3fn f6e3m2fn "
    "f8e3m4 f8e4m3 f8e4m3b11fnuz f8e4m3fn f8e4m3fnuz f8e5m2 f8e5m2fnuz f8e8m0fnu f16 "
    "bf16 f32 f64 c64 c128 token opaque".split()
)
TUPLE, BUFFER = "tuple", "buffer"
# A tile dimension `*` takes in the dimension before it.
COMBINE = -1

_ARRAY = re.compile(r"([A-Za-z]\w*)\[([^\[\]]*)\]\s*(?:\{(.*)\})?\s*", re.DOTALL)
_LAYOUT_PART = re.compile(rf"([A-Z#*]+)(\({lexer.BALANCED}\))|(\({lexer.BALANCED}\))")
_KNOWN_PARTS = "TSE"


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array lies in memory.

    Attributes:
        minor_to_major: dimensions, the fastest varying one first.
        tiles: tiles from the outermost in; `COMBINE` stands for `*`.
        memory_space: S(n): 0 is the default, others are the backend's (TPU: 1 is
            VMEM, 2 is synchronization flags, 4 SMEM; CPU and GPU: 5 is the host).
        element_bits: E(n): bits of an element that is packed, else None.
        other: what else the layout says, as it is written.
    """

    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    memory_space: int = 0
    element_bits: int | None = None
    other: str = ""

    def __str__(self) -> str:
        text = ",".join(map(str, self.minor_to_major))
        tail = ""
        if self.tiles:
            tail += "T" + "".join(
                f"({','.join('*' if d == COMBINE else str(d) for d in tile)})"
                for tile in self.tiles
            )
        tail += self.other
        if self.element_bits is not None:
            tail += f"E({self.element_bits})"
        if self.memory_space:
            tail += f"S({self.memory_space})"
        return f"{{{text}:{tail}}}" if tail else f"{{{text}}}"


@dataclass(frozen=True, slots=True)
class Shape:
    """Type of an HLO value: an array, a token, an opaque value or a tuple.

    Attributes:
        element_type: as HLO spells it; "tuple" for a tuple, "buffer" for b(...).
        dimensions: sizes; upper bounds where dynamic, -1 where unbounded.
        dynamic: for each dimension, whether its size is known at run time only.
        layout: None where the text has none.
        elements: shapes in a tuple or buffer.
    """

    element_type: str
    dimensions: tuple[int, ...] = ()
    dynamic: tuple[bool, ...] = ()
    layout: Layout | None = None
    elements: tuple[Shape, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads a shape; what is none becomes a shape of an unknown element type."""
        return parse_shape(text.strip())

    @property
    def is_tuple(self) -> bool:
        return self.element_type == TUPLE

    @property
    def rank(self) -> int:
        return len(self.dimensions)

    @property
    def is_known(self) -> bool:
        """Whether every element type in it is one that this package knows."""
        if self.elements or self.element_type in (TUPLE, BUFFER):
            return all(part.is_known for part in self.elements)
        return self.element_type in KNOWN_ELEMENT_TYPES

    @property
    def element_bits(self) -> int:
        """Bits that an element takes; types of under a byte take a whole one,
        unless the layout packs them. Unknown types go by the number in their name."""
        if self.layout is not None and self.layout.element_bits:
            return self.layout.element_bits
        bits = _bits_of(self.element_type)
        return -(-bits // 8) * 8

    @property
    def element_count(self) -> int:
        """Elements of an array (1 for a scalar), or of all arrays of a tuple."""
        if self.element_type in (TUPLE, BUFFER):
            return sum(part.element_count for part in self.elements)
        return math.prod(max(size, 0) for size in self.dimensions)

    @property
    def byte_size(self) -> int:
        """Bytes of the elements, of a tuple's arrays together; no padding."""
        if self.element_type in (TUPLE, BUFFER):
            return sum(part.byte_size for part in self.elements)
        return -(-self.element_count * self.element_bits // 8)

    @property
    def padded_byte_size(self) -> int:
        """Bytes in memory, with the padding of the first tile."""
        if self.element_type in (TUPLE, BUFFER):
            return sum(part.padded_byte_size for part in self.elements)
        layout = self.layout
        if layout is None or not layout.tiles or COMBINE in layout.tiles[0]:
            return self.byte_size
        tile = layout.tiles[0]
        physical = [self.dimensions[d] for d in reversed(layout.minor_to_major)]
        physical = [1] * (len(tile) - len(physical)) + physical
        first = len(physical) - len(tile)
        for i, size in enumerate(tile):
            physical[first + i] = -(-physical[first + i] // size) * size
        return -(-math.prod(physical) * self.element_bits // 8)

    def arrays(self) -> Iterator[Shape]:
        """The shapes that are no tuples, in order."""
        if self.element_type not in (TUPLE, BUFFER):
            yield self
        for part in self.elements:
            yield from part.arrays()

    def without_layout(self) -> Shape:
        """The same shape with nothing said about its layout."""
        return _without_layout(self)

    def __str__(self) -> str:
        if self.element_type in (TUPLE, BUFFER):
            prefix = "b" if self.element_type == BUFFER else ""
            return f"{prefix}({', '.join(map(str, self.elements))})"
        dynamic = self.dynamic or (False,) * len(self.dimensions)
        sizes = (
            ("?" if size < 0 else f"<={size}") if loose else str(size)
            for size, loose in zip(self.dimensions, dynamic, strict=True)
        )
        layout = "" if self.layout is None else str(self.layout)
        return f"{self.element_type}[{','.join(sizes)}]{layout}"


UNKNOWN_SHAPE = Shape("unknown")


@functools.cache
def _bits_of(element_type: str) -> int:
    if element_type in _BITS:
        return _BITS[element_type]
    found = _WIDTH.match(element_type)
    return int(found[1]) if found else 0


@functools.lru_cache(maxsize=1 << 16)
def _without_layout(shape: Shape) -> Shape:
    return Shape(
        shape.element_type,
        shape.dimensions,
        shape.dynamic,
        None,
        tuple(part.without_layout() for part in shape.elements),
    )


@functools.lru_cache(maxsize=1 << 16)
def parse_shape(text: str) -> Shape:
    """See `Shape.parse`."""
    prefix, _, _ = text.partition("(")
    if prefix in ("", "b") and text.endswith(")"):
        body = lexer.without_comments(text[len(prefix) + 1 : -1])
        parts = tuple(parse_shape(part) for part in lexer.split(body))
        return Shape(BUFFER if prefix else TUPLE, elements=parts)
    found = _ARRAY.fullmatch(text)
    if found is None:
        return Shape(text or "unknown")
    sizes, dynamic = [], []
    for part in found[2].split(","):
        part = part.strip()
        if not part:
            continue
        loose = part.startswith("<=") or part == "?"
        digits = part.removeprefix("<=")
        sizes.append(int(digits) if digits.isdigit() else -1)
        dynamic.append(loose or not digits.isdigit())
    loose_sizes = tuple(dynamic) if any(dynamic) else ()
    layout = None if found[3] is None else _parse_layout(found[3])
    return Shape(found[1], tuple(sizes), loose_sizes, layout)


def _parse_layout(text: str) -> Layout:
    order, _, tail = text.partition(":")
    numbers = [part.strip() for part in order.split(",")]
    if not all(part.isdigit() for part in numbers if part):
        return Layout(other=text)
    minor_to_major = tuple(int(part) for part in numbers if part)
    tiles: list[tuple[int, ...]] = []
    space, bits, other, key = 0, None, "", ""
    for found in _LAYOUT_PART.finditer(tail):
        key = found[1] or key
        body = lexer.inside(found[2] or found[3])
        if key == "T" and re.fullmatch(r"[\d,*\s-]+", body):
            tiles.append(tuple(_tile_size(size) for size in body.split(",")))
        elif key == "S" and body.isdigit():
            space = int(body)
        elif key == "E" and body.isdigit():
            bits = int(body)
        else:
            other += found[0]
    return Layout(minor_to_major, tuple(tiles), space, bits, other)


def _tile_size(text: str) -> int:
    return int(text) if text.strip().isdigit() else COMBINE
