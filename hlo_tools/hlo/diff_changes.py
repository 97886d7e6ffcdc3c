"""In what respects two matched values differ."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from hlo_tools.hlo import diff_labels
from hlo_tools.hlo.diff_graph import OUTPUT, Node
from hlo_tools.hlo.diff_labels import COMMUTATIVE, SIZED
from hlo_tools.hlo.diff_match import NONE, Matching
from hlo_tools.hlo.diff_result import Detail
from hlo_tools.hlo.ir import HloInstruction
from hlo_tools.hlo.shapes import Shape

# Nodes that stand for no instruction of their own.
VIRTUAL = ("tuple", "while carry", "while", "conditional")
_LONGEST = 80
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(slots=True)
class PairChange:
    """How two matched nodes differ.

    Attributes:
        details: respects in which what they compute differs.
        sizes: sizes that differ, (old, new).
        types: element types that differ, (old, new).
        is_reordered: whether a commutative operation has its operands swapped.
    """

    details: list[Detail] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    types: list[tuple[str, str]] = field(default_factory=list)
    sized_attributes: list[Detail] = field(default_factory=list)
    is_reordered: bool = False


def compare_pairs(matching: Matching) -> dict[tuple[int, int], PairChange]:
    """The matched pairs that differ, and how."""
    found = {}
    for i, j in enumerate(matching.to_b):
        if j == NONE:
            continue
        change = _compare(matching, matching.a.nodes[i], matching.b.nodes[j])
        if change is not None:
            found[i, j] = change
    return found


def _compare(matching: Matching, a: Node, b: Node) -> PairChange | None:
    change = PairChange()
    if matching.exact[0][a.index] != matching.exact[1][b.index]:
        _compare_labels(a, b, change)
    _compare_operands(matching, a, b, change)
    empty = PairChange()
    return None if change == empty else change


def _compare_labels(a: Node, b: Node, change: PairChange) -> None:
    first, second = a.instruction, b.instruction
    if a.opcode != b.opcode:
        change.details.append(Detail("opcode", a.opcode, b.opcode))
    if a.opcode in VIRTUAL or b.opcode in VIRTUAL or OUTPUT in (a.opcode, b.opcode):
        return
    _compare_shapes(first.shape, second.shape, change)
    constants = diff_labels.payload(first), diff_labels.payload(second)
    if a.opcode == b.opcode and constants[0] != constants[1]:
        change.details.append(Detail("constant", *map(_short, constants)))
    before = diff_labels.compared_attributes(first)
    after = diff_labels.compared_attributes(second)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            detail = Detail(
                key,
                _short(first.attributes.get(key, "")),
                _short(second.attributes.get(key, "")),
            )
            (change.sized_attributes if key in SIZED else change.details).append(detail)
    called = diff_labels.called_labels(first), diff_labels.called_labels(second)
    if called[0] != called[1]:
        change.details.append(Detail("calls", _callees(first), _callees(second)))


def _compare_shapes(first: Shape, second: Shape, change: PairChange) -> None:
    before, after = list(first.arrays()), list(second.arrays())
    if len(before) != len(after):
        change.details.append(Detail("shape", str(first), str(second)))
        return
    for x, y in zip(before, after, strict=True):
        if x.element_type != y.element_type:
            change.types.append((x.element_type, y.element_type))
        if x.rank != y.rank:
            change.details.append(Detail("shape", str(x), str(y)))
        elif x.dimensions != y.dimensions or x.dynamic != y.dynamic:
            sizes = zip(x.dimensions, y.dimensions, strict=True)
            change.sizes.extend((m, n) for m, n in sizes if m != n)
            if x.dimensions == y.dimensions:
                change.details.append(Detail("shape", str(x), str(y)))


def _callees(instruction: HloInstruction) -> str:
    """What an instruction calls: the opcode of a small computation, else its name."""
    texts = []
    for computation in instruction.called:
        root = computation.root
        small = [i for i in computation if i.opcode != "parameter"]
        name = root.opcode if root is not None and len(small) == 1 else computation.name
        texts.append(name)
    return ", ".join(texts)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _compare_operands(matching: Matching, a: Node, b: Node, change: PairChange) -> None:
    """Operands that both have a counterpart, but each another one."""
    if len(a.operands) != len(b.operands):
        _compare_operand_counts(matching, a, b, change)
        return
    rewired = [
        (x, y)
        for x, y in zip(a.operands, b.operands, strict=True)
        if _is_rewired(matching, x, y)
    ]
    if not rewired:
        return
    if a.opcode in COMMUTATIVE and a.opcode == b.opcode and len(a.operands) == 2:
        x, y = a.operands
        if not any(
            _is_rewired(matching, *pair)
            for pair in zip((x, y), reversed(b.operands), strict=True)
        ):
            change.is_reordered = True
            return
    for x, y in rewired:
        before = matching.a.nodes[x].instruction
        after = matching.b.nodes[y].instruction
        change.details.append(Detail("operands", _describe(before), _describe(after)))


def _compare_operand_counts(
    matching: Matching, a: Node, b: Node, change: PairChange
) -> None:
    """More or fewer operands: those that are there on both sides, but not here."""
    there = {matching.to_b[x] for x in a.operands}
    here = set(b.operands)
    gone = [x for x in a.operands if matching.to_b[x] not in here | {NONE}]
    new = [y for y in b.operands if matching.to_a[y] != NONE and y not in there]
    # A value that is there twice may stand for itself.
    values = {matching.values[1][y] for y in b.operands}
    gone = [x for x in gone if matching.values[1][matching.to_b[x]] not in values]
    values = {matching.values[0][x] for x in a.operands}
    new = [y for y in new if matching.values[0][matching.to_a[y]] not in values]
    if gone or new:
        change.details.append(
            Detail(
                "operands",
                ", ".join(_describe(matching.a.nodes[x].instruction) for x in gone[:3]),
                ", ".join(_describe(matching.b.nodes[y].instruction) for y in new[:3]),
            )
        )


def _is_rewired(matching: Matching, x: int, y: int) -> bool:
    """Whether operand x of a and y of b are each some other value's counterpart."""
    other_y, other_x = matching.to_b[x], matching.to_a[y]
    if other_y == y or NONE in (other_y, other_x):
        return False
    # The counterpart may be there several times: any of them will do.
    in_b = matching.values[1][other_y] == matching.values[1][y]
    in_a = matching.values[0][other_x] == matching.values[0][x]
    return not (in_b or in_a)


def _describe(instruction: HloInstruction) -> str:
    name = instruction.op_name or f"%{instruction.name}"
    return f"{instruction.opcode} {name}"


def follows_sizes(detail: Detail, sizes: Collection[tuple[int, int]]) -> bool:
    """Whether a constant changed as the sizes did: 1/8 to 1/16, or to the last index.

    Args:
        detail: with the two literals.
        sizes: that changed, (old, new).
    """
    if not (_NUMBER.fullmatch(detail.before) and _NUMBER.fullmatch(detail.after)):
        return False
    before, after = float(detail.before), float(detail.after)
    if any(before + 1 == old and after + 1 == new for old, new in sizes):
        return True
    if not before or not after or before * after < 0:
        return False
    ratios = [new / old for old, new in sizes if old > 0 and new > 0]
    known = [r**power for r in ratios for power in (1, -1, 0.5, -0.5)]
    return any(math.isclose(after / before, k, rel_tol=1e-5) for k in known)


def generators(sizes: dict[int, int]) -> dict[str, str]:
    """The changed sizes without those that are multiples of others.

    Args:
        sizes: old to new.

    Returns:
        As text: 512 to 1024 is left out where 8 to 16 is there.
    """
    kept: dict[int, int] = {}
    for old, new in sorted(sizes.items()):
        if not any(
            small and old % small == 0 and old // small * other == new
            for small, other in kept.items()
        ):
            kept[old] = new
    return {str(old): str(new) for old, new in kept.items()}
