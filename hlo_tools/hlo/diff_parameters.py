"""Which parameter of one module is which of the other."""

from __future__ import annotations

import difflib

from hlo_tools.hlo.diff_graph import Graph
from hlo_tools.hlo.ir import HloInstruction


def match_parameters(a: Graph, b: Graph) -> list[tuple[int, int]]:
    """Which parameter of one entry is which of the other, as nodes.

    By name where the modules share most names, else by number where there are equally
    many, else by the order of shapes.
    """
    first = [(n, a.nodes[i].instruction) for n, i in sorted(a.parameters.items())]
    second = [(n, b.nodes[i].instruction) for n, i in sorted(b.parameters.items())]
    named = _by_name(first, second)
    if named is None:
        if len(first) == len(second):
            named = [(x[0], y[0]) for x, y in zip(first, second, strict=True)]
        else:
            named = _by_order(first, second)
    return [(a.parameters[x], b.parameters[y]) for x, y in named]


def _by_name(
    first: list[tuple[int, HloInstruction]], second: list[tuple[int, HloInstruction]]
) -> list[tuple[int, int]] | None:
    names = [[i.op_name for _, i in side] for side in (first, second)]
    if any("" in side or len(set(side)) < len(side) for side in names):
        return None
    there = {name: n for name, (n, _) in zip(names[1], second, strict=True)}
    pairs = [
        (n, there[name])
        for name, (n, _) in zip(names[0], first, strict=True)
        if name in there
    ]
    return pairs if 2 * len(pairs) >= max(1, min(len(first), len(second))) else None


def _by_order(
    first: list[tuple[int, HloInstruction]], second: list[tuple[int, HloInstruction]]
) -> list[tuple[int, int]]:
    shapes = [
        [str(i.shape.without_layout()) for _, i in side] for side in (first, second)
    ]
    blocks = difflib.SequenceMatcher(None, *shapes, autojunk=False)
    return [
        (first[x + k][0], second[y + k][0])
        for x, y, size in blocks.get_matching_blocks()
        for k in range(size)
    ]
