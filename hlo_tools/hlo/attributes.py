"""What the attributes of an instruction mean: groups, windows, shardings, metadata."""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from hlo_tools.hlo import lexer

_IOTA = re.compile(r"\[([\d,\s]+)\]<=\[([\d,\s]+)\](?:T\(([\d,\s]+)\))?")
_KEY = re.compile(
    rf"\s*([\w.\-]+)\s*=\s*({lexer.STRING}|[\w.+\-]+|\{{{lexer.BALANCED}\}})"
)
_MESH = re.compile(
    r"mesh\[([^\]]*)\](<=\[[\d,\s]+\](?:T\([\d,\s]+\))?)?\s*\{([^{}]*)\}"
)
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_PAD = re.compile(r"(-?\d+)_(-?\d+)(?:_(-?\d+))?")
_DIM_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")


def ints(text: str) -> tuple[int, ...]:
    """The integers in a list like {0,2}, in order."""
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def names(text: str) -> tuple[str, ...]:
    """The names in %a or {%a, %b}, without their signs."""
    parts = lexer.split(lexer.without_comments(lexer.inside(text)))
    return tuple(part.removeprefix("%") for part in parts)


def nested_ints(text: str) -> tuple[tuple[int, ...], ...]:
    """The lists in {{0,1},{2,3}}."""
    return tuple(ints(part) for part in lexer.split(lexer.inside(text)))


def replica_groups(text: str) -> tuple[tuple[int, ...], ...] | None:
    """The groups of a collective: {{0,1},{2,3}}, [2,2]<=[4], mesh['x'=2,'y'=2] {'x'}.

    Returns:
        One tuple of device numbers a group; () is one group of all devices; None for
        a spelling that is not known.
    """
    text = text.strip()
    if found := _IOTA.fullmatch(text):
        sizes = ints(found[2])
        ids = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
        if found[3]:
            ids = ids.transpose(ints(found[3]))
        return tuple(tuple(group) for group in ids.reshape(ints(found[1])).tolist())
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("{") and re.fullmatch(r"[\d{},\s]*", text):
        return nested_ints(text)
    return None


def _mesh_groups(text: str) -> tuple[tuple[int, ...], ...] | None:
    """Groups of the devices that differ in the named axes of a mesh only."""
    found = _MESH.fullmatch(text)
    if found is None:
        return None
    sizes = {name: int(size) for name, size in _AXIS.findall(found[1])}
    if found[2]:
        groups = replica_groups(f"[1,{math.prod(sizes.values())}]{found[2]}")
        if groups is None:
            return None
        ids = np.asarray(groups)
    else:
        ids = np.arange(math.prod(sizes.values()))
    # Each axis is split in three, so that a part of an axis, 'x':(2)4, is one too.
    split: list[int] = []
    chosen: list[int] = []
    wanted = {name: (pre, size) for name, pre, size in _PART.findall(found[3])}
    if not set(wanted) <= set(sizes):
        return None
    position = {}
    for name, size in sizes.items():
        pre, inner = wanted.get(name, ("", ""))
        before = int(pre) if pre else 1
        here = int(inner) if inner else size
        if size % (before * here):
            return None
        position[name] = len(split) + 1
        split += [before, here, size // (before * here)]
    chosen = [position[name] for name in wanted]
    others = [axis for axis in range(len(split)) if axis not in chosen]
    ids = ids.reshape(split).transpose(others + chosen)
    width = math.prod(split[axis] for axis in chosen)
    return tuple(tuple(group) for group in ids.reshape(-1, width).tolist())


@dataclass(frozen=True, slots=True)
class Window:
    """Window of a convolution or reduce-window, one entry a spatial dimension."""

    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    pad: tuple[tuple[int, int], ...] = ()
    lhs_dilate: tuple[int, ...] = ()
    rhs_dilate: tuple[int, ...] = ()
    rhs_reversal: tuple[int, ...] = ()

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def parse(cls, text: str) -> Window:
        """Reads {size=3x3 pad=1_1x1_1 stride=2x2}; what is not said is 1, or 0."""
        said = dict(
            part.split("=", 1) for part in lexer.inside(text).split() if "=" in part
        )
        size = _by(said.get("size", ""))
        rank = len(size)
        pad = tuple(
            (int(found[1]), int(found[2]))
            for found in _PAD.finditer(said.get("pad", ""))
        )
        ones, zeros = (1,) * rank, (0,) * rank
        return cls(
            size,
            _by(said.get("stride", "")) or ones,
            pad or ((0, 0),) * rank,
            _by(said.get("lhs_dilate", "")) or ones,
            _by(said.get("rhs_dilate", "")) or ones,
            _by(said.get("rhs_reversal", "")) or zeros,
        )


def _by(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x") if part.lstrip("-").isdigit())


def padding(text: str) -> tuple[tuple[int, int, int], ...]:
    """(low, high, interior) of each dimension in a pad's 0_1x0_0_2."""
    return tuple(
        (int(low), int(high), int(interior or 0))
        for low, high, interior in _PAD.findall(text)
    )


def dim_labels(text: str) -> tuple[str, str, str] | None:
    """Labels of input, kernel and output of a convolution's bf01_01io->bf01."""
    found = _DIM_LABELS.fullmatch(text.strip())
    return (found[1], found[2], found[3]) if found else None


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a value is spread over devices.

    Attributes:
        kind: "replicated", "manual", "maximal", "tiled", "tuple", or "other" for a
            spelling that is not known.
        tile_dims: in how many parts each dimension is cut, those of subgroups last.
        devices: device numbers, in the order of the tiles.
        replicate_last: whether the last of `tile_dims` is replication.
        subgroups: kinds of the last of `tile_dims` ("manual", "replicated").
        elements: shardings of a tuple's elements.
        raw: as it is written.
    """

    kind: str
    tile_dims: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    replicate_last: bool = False
    subgroups: tuple[str, ...] = ()
    elements: tuple[Sharding, ...] = ()
    raw: str = ""

    @classmethod
    def parse(cls, text: str) -> Sharding:
        """Reads what stands after `sharding=`."""
        return _parse_sharding(text.strip())


@functools.lru_cache(maxsize=4096)
def _parse_sharding(text: str) -> Sharding:
    body = lexer.inside(text).strip()
    if body.startswith("{"):
        parts = tuple(_parse_sharding(part) for part in lexer.split(body))
        return Sharding("tuple", elements=parts, raw=text)
    word = body.split(" ")[0]
    if word in ("replicated", "manual"):
        return Sharding(word, raw=text)
    if word.startswith("maximal"):
        return Sharding("maximal", devices=ints(body.partition("device=")[2]), raw=text)
    found = re.match(
        r"devices=(\[[\d,]+\])(?:(<=\[[\d,]+\](?:T\([\d,]+\))?)|([\d,]+))(.*)", body
    )
    if found is None:
        return Sharding("other", raw=text)
    dims = ints(found[1])
    if found[2]:
        groups = replica_groups(f"[1,{int(np.prod(dims))}]{found[2]}") or ((),)
        devices = groups[0]
    else:
        devices = ints(found[3])
    rest = found[4]
    subgroups = re.search(r"last_tile_dims=\{([^}]*)\}", rest)
    return Sharding(
        "tiled",
        dims,
        devices,
        "last_tile_dim_replicate" in rest,
        tuple(part.strip() for part in subgroups[1].split(",")) if subgroups else (),
        raw=text,
    )


@dataclass(frozen=True, slots=True)
class Metadata:
    """Where an instruction comes from.

    Attributes:
        op_name: path of names in the user's program, "jit(f)/layer_1/dot_general".
        op_type: kind of operation in the user's framework.
        source_file, source_line: the user's line, where it is in the instruction.
        stack_frame_id: index into the module's stack frames; 0 is none.
        other: what else is said, as it is written.
    """

    op_name: str = ""
    op_type: str = ""
    source_file: str = ""
    source_line: int = 0
    stack_frame_id: int = 0
    other: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Metadata:
        """Reads what stands after `metadata=`."""
        return _parse_metadata(text)


_TEXTS = ("op_name", "op_type", "source_file")
_NUMBERS = ("source_line", "stack_frame_id")


@functools.lru_cache(maxsize=1 << 15)
def _parse_metadata(text: str) -> Metadata:
    known: dict[str, Any] = {}
    other: list[tuple[str, str]] = []
    for key, value in fields(text).items():
        if key in _TEXTS:
            known[key] = lexer.unquote(value)
        elif key in _NUMBERS and value.isdigit():
            known[key] = int(value)
        else:
            other.append((key, value))
    return Metadata(**known, other=tuple(other))


def fields(text: str) -> dict[str, str]:
    """The key=value pairs in {...}, between commas or blanks, values as written."""
    return {found[1]: found[2] for found in _KEY.finditer(lexer.inside(text))}


def backend_config(text: str) -> Any:
    """A backend configuration as JSON values, or None if it is no JSON."""
    body = lexer.unquote(text.strip())
    if not body.startswith(("{", "[")):
        return None
    try:
        return json.loads(body)
    except ValueError:
        return None
