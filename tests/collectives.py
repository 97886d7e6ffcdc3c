"""Reads the collectives of a compiled program off its HLO text."""

import math
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

_OPS = (
    "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    "ragged-all-to-all|collective-broadcast"
)
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALL = re.compile(
    rf"= (?P<type>\(.*?\)|\S+) (?P<op>{_OPS})(?P<start>-start)?\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_EXPLICIT = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# The axes of a mesh, and those that a group runs over: whole, or (major sizes)size.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}")
_DIMENSIONS = re.compile(r"[^_]dimensions=\{([\d,]*)\}")
_CALLEES = re.compile(
    r"(body|condition|calls|to_apply|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)"
)


@dataclass(frozen=True, order=True)
class Collective:
    """One array that a collective moves.

    Attributes:
      op: "all-reduce" ...
      shape: of its result, without dimensions of size 1: "f32[8,32]".
      groups: sets of devices that take part, or the pairs of a permutation.
      dimensions: along which it works, for those that have one.
      loops: how many loops it stands in.
    """

    op: str
    shape: str
    groups: tuple[tuple[int, ...], ...]
    dimensions: str
    loops: int


def collectives(text: str) -> Counter[Collective]:
    """Returns how often each collective occurs in a module's HLO text.

    A collective of several arrays, as XLA's combiner makes them, counts once for
    each; of an asynchronous one, the start counts.
    """
    depth = _loop_depths(text)
    found: Counter[Collective] = Counter()
    for name, line in _lines(text):
        call = _CALL.search(line)
        if call is None:
            continue
        arrays = _ARRAY.findall(call["type"])
        if call["start"] and call["op"] != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
        groups = _groups(call["rest"])
        dims = _DIMENSIONS.search(call["rest"])
        for dtype, sizes in arrays:
            shape = ",".join(n for n in sizes.split(",") if n != "1")
            where = dims[1] if dims else ""
            key = (call["op"], f"{dtype}[{shape}]", groups, where, depth[name])
            found[Collective(*key)] += 1
    return found


def _lines(text: str):
    """Yields (name of the computation, line)."""
    name = ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            name = head[1]
        yield name, line


def _loop_depths(text: str) -> dict[str, int]:
    """Returns in how many loops each computation runs."""
    callers: dict[str, set[tuple[str, int]]] = {}
    names = set()
    for name, line in _lines(text):
        names.add(name)
        for kind, listed in _CALLEES.findall(line):
            for callee in re.findall(r"[\w.\-]+", listed):
                loop = int(kind in ("body", "condition"))
                callers.setdefault(callee, set()).add((name, loop))

    def depth(name: str) -> int:
        above = callers.get(name, set())
        return max((depth(other) + loop for other, loop in above), default=0)

    return {name: depth(name) for name in names}


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    found = _PAIRS.search(text) or _EXPLICIT.search(text)
    if found is not None:
        groups = re.findall(r"\{([\d,]*)\}", found[1])
        return tuple(sorted(_numbers(group) for group in groups))
    mesh = _MESH.search(text)
    if mesh is not None:
        return _mesh_groups(mesh[1], mesh[2])
    iota = _IOTA.search(text)
    assert iota is not None, text
    shape = _numbers(iota[2])
    ids = np.arange(np.prod(shape)).reshape(shape)
    if iota[3]:
        ids = ids.transpose(_numbers(iota[3]))
    return _rows(ids.reshape(_numbers(iota[1])))


def _mesh_groups(mesh: str, over: str) -> tuple[tuple[int, ...], ...]:
    axes = [(name, int(size)) for name, size, _, _ in _AXIS.findall(mesh)]
    assert axes, mesh
    shape, at = [], {}  # each axis is cut into three: major, named, minor
    parts = {name: (pre, size) for name, _, pre, size in _AXIS.findall(over)}
    assert len(parts) == over.count(",") + 1, over  # no axis in two parts
    for name, size in axes:
        pre, part = (int(n or 0) for n in parts.get(name, (size, 1)))
        major, named = (pre, part) if part else (1, size)
        at[name] = len(shape) + 1
        shape += [major, named, size // (major * named)]
    ids = np.arange(np.prod(shape)).reshape(shape)
    ids = np.moveaxis(ids, [at[n] for n in parts], range(-len(parts), 0))
    return _rows(ids.reshape(-1, math.prod(ids.shape[-len(parts) :])))


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(row) for row in ids.tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
