"""Changed values that hang together, as places; the same change elsewhere once."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable

from hlo_tools.hlo.diff_changes import VIRTUAL, PairChange
from hlo_tools.hlo.diff_graph import OUTPUT, Node
from hlo_tools.hlo.diff_labels import COMMUTATIVE
from hlo_tools.hlo.diff_match import NONE, Matching
from hlo_tools.hlo.diff_result import Change, Cost, InstructionRef, Place

COPIES = frozenset(("copy", "copy-start", "copy-done", "bitcast"))
_Key = tuple[int, int]  # side, node


def find_places(
    matching: Matching, changed: dict[tuple[int, int], PairChange]
) -> list[Place]:
    """The places of nodes without a counterpart and of pairs in `changed`."""
    return _Places(matching, changed).places()


class _Places:
    """The regions of changed nodes, joined as they are found to hang together."""

    def __init__(self, matching: Matching, changed: dict[tuple[int, int], PairChange]):
        self.matching = matching
        self.graphs = matching.a, matching.b
        self.taken = matching.to_b, matching.to_a
        self.changed = changed
        self.parent: dict[_Key, _Key] = {}
        for side, graph in enumerate(self.graphs):
            for node in graph.nodes:
                if self.taken[side][node.index] == NONE:
                    self.parent[side, node.index] = (side, node.index)
        for i, j in changed:
            self.parent[0, i] = (0, i)
            self.parent[1, j] = (1, j)
        self.fixed = matching.fixed

    def find(self, key: _Key) -> _Key:
        root = key
        while self.parent[root] != root:
            root = self.parent[root]
        while self.parent[key] != root:
            self.parent[key], key = root, self.parent[key]
        return root

    def join(self, x: _Key, y: _Key) -> None:
        self.parent[self.find(x)] = self.find(y)

    def places(self) -> list[Place]:
        self.join_neighbors()
        for i, j in self.changed:
            self.join((0, i), (1, j))
        self.join_at_users()
        self.join_fixed()
        self.join_at_operands()
        groups: dict[_Key, list[_Key]] = collections.defaultdict(list)
        for key in sorted(self.parent):
            groups[self.find(key)].append(key)
        places = [self.place(keys) for keys in groups.values()]
        return _collapse([place for place in places if place is not None])

    def join_neighbors(self) -> None:
        for side, index in self.parent:
            if self.fixed[side][index]:
                continue
            for operand in self.graphs[side].nodes[index].operands:
                if (side, operand) in self.parent and not self.fixed[side][operand]:
                    self.join((side, index), (side, operand))

    def join_fixed(self) -> None:
        """Constants belong to what uses them, without joining their users."""
        for side, index in sorted(self.parent, reverse=True):
            if not self.fixed[side][index]:
                continue
            for user, _ in self.graphs[side].nodes[index].users:
                if (side, user) in self.parent:
                    self.join((side, index), (side, user))
                    break

    def join_at_users(self) -> None:
        """Joins what feeds the same operand of the same user on the two sides."""
        for side, index in list(self.parent):
            if side == 1 or self.fixed[0][index]:
                continue
            for user, position in self.graphs[0].nodes[index].users:
                other = self.matching.to_b[user]
                if (0, user) in self.parent or other == NONE:
                    continue
                for operand in self.fed(self.graphs[0].nodes[user], other, position):
                    if (1, operand) in self.parent and not self.fixed[1][operand]:
                        self.join((0, index), (1, operand))

    def fed(self, user: Node, other: int, position: int) -> Iterable[int]:
        """The operands of a user's counterpart that an operand may stand for."""
        operands = self.graphs[1].nodes[other].operands
        if user.opcode in COMMUTATIVE:
            return operands
        if user.opcode == OUTPUT and len(user.operands) != len(operands):
            return ()
        return operands[position : position + 1]

    def join_at_operands(self) -> None:
        """Joins regions of one side each that begin at the same value."""
        sides: dict[_Key, set[int]] = collections.defaultdict(set)
        for key in self.parent:
            sides[self.find(key)].add(key[0])
        alone = {key for key in self.parent if len(sides[self.find(key)]) == 1}
        begins: dict[int, list[_Key]] = collections.defaultdict(list)
        for side, index in sorted(alone):
            for operand in self.graphs[side].nodes[index].operands:
                other = self.taken[side][operand]
                if other != NONE and not self.fixed[side][operand]:
                    at = operand if side == 0 else other
                    begins[at].append((side, index))
        for keys in begins.values():
            first = [key for key in keys if key[0] == 0]
            second = [key for key in keys if key[0] == 1]
            if (
                len({self.find(k) for k in first})
                == 1
                == len({self.find(k) for k in second})
            ):
                self.join(first[0], second[0])

    def place(self, keys: list[_Key]) -> Place | None:
        changes, seen = [], set()
        for side, index in keys:
            change = self.change(side, index)
            if change is not None and (change.a, change.b) not in seen:
                seen.add((change.a, change.b))
                changes.append(change)
        if not changes:
            return None
        return Place(
            self.kind(keys),
            tuple(changes),
            cost_a=self.cost(keys, 0),
            cost_b=self.cost(keys, 1),
            signature=self.signature(keys),
        )

    def change(self, side: int, index: int) -> Change | None:
        node = self.graphs[side].nodes[index]
        other = self.taken[side][index]
        if other == NONE:
            if node.opcode in VIRTUAL or node.opcode == OUTPUT:
                return None
            ref = self.ref(side, node)
            return Change(ref, None) if side == 0 else Change(None, ref)
        if side == 1:
            return None  # told with its counterpart
        details = self.changed[index, other]
        return Change(
            self.ref(0, node),
            self.ref(1, self.graphs[1].nodes[other]),
            (*details.details, *details.sized_attributes),
        )

    def ref(self, side: int, node: Node) -> InstructionRef:
        op_name = self.graphs[side].op_name(node)
        return InstructionRef.of(node.instruction, op_name)

    def kind(self, keys: list[_Key]) -> str:
        nodes = [self.graphs[side].nodes[index] for side, index in keys]
        pairs = [self.changed[i, self.matching.to_b[i]] for i in self.paired(keys)]
        if not pairs:
            if all(self.is_duplicate(*key) for key in keys):
                return "duplicates"
            if all(n.opcode in COPIES or n.opcode in VIRTUAL for n in nodes):
                return "copies"
            sides = {side for side, index in keys if not self.fixed[side][index]}
            if len(sides) == 1:
                return "inserted" if sides == {1} else "removed"
            return "ops"
        if len(pairs) * 2 < len(keys):
            return "ops"
        aspects = {d.aspect for p in pairs for d in (*p.details, *p.sized_attributes)}
        if aspects == {"constant"}:
            return "constants"
        if aspects == {"operands"}:
            return "wiring"
        if aspects & {"opcode", "constant", "operands", "shape"} or not aspects:
            return "ops"
        return "attributes"

    def paired(self, keys: list[_Key]) -> list[int]:
        return [i for side, i in keys if side == 0 and self.matching.to_b[i] != NONE]

    def is_duplicate(self, side: int, index: int) -> bool:
        """Whether the other module has the same value, as the counterpart of another
        node of this one."""
        return any(
            values[side][index] in there
            for values, there in zip(
                (self.matching.values, self.matching.loose_values),
                self.known(1 - side),
                strict=True,
            )
        )

    def known(self, side: int) -> tuple[set[int], set[int]]:
        if not hasattr(self, "_known"):
            self._known = [
                (
                    set(self.matching.values[s]),
                    set(self.matching.loose_values[s]),
                )
                for s in (0, 1)
            ]
        return self._known[side]

    def cost(self, keys: list[_Key], side: int) -> Cost:
        nodes = [self.graphs[s].nodes[i] for s, i in keys if s == side]
        sizes = [
            node.instruction.shape.byte_size
            for node in nodes
            if node.opcode not in VIRTUAL and node.opcode not in ("constant", OUTPUT)
        ]
        return Cost(sum(sizes))

    def signature(self, keys: list[_Key]) -> str:
        """Labels of the nodes and of their operands, without where they are."""
        parts = []
        for side, index in keys:
            node = self.graphs[side].nodes[index]
            exact = self.matching.exact[side]
            operands = tuple(exact[o] for o in node.operands)
            parts.append((side, exact[index], operands))
        details = sorted(
            repr((d.aspect, d.before, d.after))
            for i in self.paired(keys)
            for d in self.changed[i, self.matching.to_b[i]].details
            if d.aspect != "operands"
        )
        text = repr((sorted(parts), details))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _collapse(places: list[Place]) -> list[Place]:
    """Places of one signature as one with the others as its repeats."""
    groups: dict[tuple[str, str], list[Place]] = {}
    for place in places:
        groups.setdefault((place.kind, place.signature), []).append(place)
    collapsed = [
        dataclasses.replace(group[0], repeats=tuple(group[1:]))
        for group in groups.values()
    ]
    return sorted(collapsed, key=lambda p: -len(p.changes) * (1 + len(p.repeats)))
