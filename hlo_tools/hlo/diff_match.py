"""Which value of one module is which of another.

Each value has two fingerprints: what it is computed from (down: its label and those of
all it depends on) and what becomes of it (up). Values of one fingerprint are one value;
from there matches spread to operands and users that look alike. Names play no part but
to choose among candidates that nothing else tells apart.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence

from hlo_tools.hlo.diff_graph import OUTPUT, Graph, Node
from hlo_tools.hlo.diff_labels import COMMUTATIVE
from hlo_tools.hlo.diff_parameters import match_parameters

NONE = -1


class Interner:
    """Numbers for keys; equal keys have equal numbers."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def __call__(self, key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known))


class Matching:
    """Matches between the nodes of two graphs.

    Attributes:
        a, b: the graphs.
        to_b, to_a: for each node the other's index, or `NONE`.
        exact, loose: for each node of a and of b its label's number.
        values, loose_values: the same for all that it is computed from.
        fixed: whether they are made of constants alone.
        parameters: nodes of the parameters that are matched.
    """

    def __init__(self, a: Graph, b: Graph):
        self.a, self.b = a, b
        self.to_b = [NONE] * len(a.nodes)
        self.to_a = [NONE] * len(b.nodes)
        self._queue: collections.deque[tuple[int, int]] = collections.deque()
        self.intern = intern = Interner()
        self.exact = tuple([intern(n.exact) for n in g.nodes] for g in (a, b))
        self.loose = tuple([intern(n.loose) for n in g.nodes] for g in (a, b))
        self.fixed = tuple([_fixed(g) for g in (a, b)])
        # of each node, what it is computed from; set by `match`
        self.values: tuple[list[int], list[int]] = ([], [])
        self.loose_values: tuple[list[int], list[int]] = ([], [])
        self.parameters: list[tuple[int, int]] = []
        self._names = tuple([g.op_name(n) for n in g.nodes] for g in (a, b))

    def add(self, i: int, j: int) -> None:
        """Matches node i of a with node j of b; both must be free."""
        self.to_b[i], self.to_a[j] = j, i
        self._queue.append((i, j))

    def is_free(self, i: int, j: int) -> bool:
        return self.to_b[i] == NONE and self.to_a[j] == NONE

    # -- by fingerprint ---------------------------------------------------------

    def match_groups(self, keys: Sequence[Sequence[int]], fixed: bool = False) -> None:
        """Matches nodes with equal keys, and what is around them.

        Args:
            keys: for each node of a and of b; equal where they may be matched.
            fixed: of what is made of constants alone, or of anything else.
        """
        groups = self._groups(keys, fixed)
        spread = keys
        for left, right in groups:
            if len(left) == len(right) == 1:
                self.add(left[0], right[0])
        self.spread(spread)
        for left, right in groups:
            if len(left) > 1 or len(right) > 1:
                self._match_group(left, right, spread)

    def _groups(
        self, keys: Sequence[Sequence[int]], fixed: bool
    ) -> list[tuple[list[int], list[int]]]:
        """Free nodes of equal keys, those of many candidates last."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for side, taken in enumerate((self.to_b, self.to_a)):
            for index, key in enumerate(keys[side]):
                if taken[index] == NONE and self.fixed[side][index] == fixed:
                    found.setdefault(key, ([], []))[side].append(index)
        groups = [group for group in found.values() if group[0] and group[1]]
        groups.sort(key=lambda group: len(group[0]))
        return groups

    def _match_group(
        self, left: list[int], right: list[int], spread: Sequence[Sequence[int]]
    ) -> None:
        by_name: dict[str, list[int]] = collections.defaultdict(list)
        for j in reversed(right):
            by_name[self._names[1][j]].append(j)
        later = []
        for i in left:
            candidates = by_name.get(self._names[0][i], [])
            while candidates and self.to_a[candidates[-1]] != NONE:
                candidates.pop()
            if self.to_b[i] != NONE:
                continue
            if candidates:
                self.add(i, candidates.pop())
                self.spread(spread)
            else:
                later.append(i)
        free = [j for j in right if self.to_a[j] == NONE]
        free.reverse()
        for i in later:
            while free and self.to_a[free[-1]] != NONE:
                free.pop()
            if not free:
                return
            if self.to_b[i] == NONE:
                self.add(i, free.pop())
                self.spread(spread)

    # -- by neighborhood --------------------------------------------------------

    def spread(self, keys: Sequence[Sequence[int]]) -> None:
        """Matches operands, and users that are the only ones of their key, of what
        was matched since the last call; on and on."""
        queue = self._queue
        while queue:
            i, j = queue.popleft()
            self._spread_down(i, j, keys)
            self._spread_up(i, j, keys)

    def spread_again(self, keys: Sequence[Sequence[int]]) -> None:
        """The same from every match."""
        self._queue.extend((i, j) for i, j in enumerate(self.to_b) if j != NONE)
        self.spread(keys)

    def _spread_down(self, i: int, j: int, keys: Sequence[Sequence[int]]) -> None:
        first, second = self.a.nodes[i], self.b.nodes[j]
        if OUTPUT in (first.opcode, second.opcode) and len(first.operands) != len(
            second.operands
        ):
            return
        if first.opcode in COMMUTATIVE and first.opcode == second.opcode:
            self._match_only_ones(
                [(o, keys[0][o]) for o in first.operands],
                [(o, keys[1][o]) for o in second.operands],
            )
            return
        for x, y in zip(first.operands, second.operands, strict=False):
            if self.is_free(x, y) and keys[0][x] == keys[1][y]:
                self.add(x, y)

    def _spread_up(self, i: int, j: int, keys: Sequence[Sequence[int]]) -> None:
        nodes = self.a.nodes, self.b.nodes
        sides = []
        for side, index, taken in ((0, i, self.to_b), (1, j, self.to_a)):
            sides.append(
                [
                    (user, (keys[side][user], _position(nodes[side][user], position)))
                    for user, position in nodes[side][index].users
                    if taken[user] == NONE
                ]
            )
        if sides[0] and sides[1]:
            self._match_only_ones(*sides)

    def _match_only_ones(
        self, left: list[tuple[int, Hashable]], right: list[tuple[int, Hashable]]
    ) -> None:
        """Matches the free nodes whose key only one node on each side has."""
        found: dict[Hashable, tuple[set[int], set[int]]] = {}
        for side, (nodes, taken) in enumerate(((left, self.to_b), (right, self.to_a))):
            for index, key in nodes:
                if taken[index] == NONE:
                    found.setdefault(key, (set(), set()))[side].add(index)
        for first, second in found.values():
            if len(first) == len(second) == 1:
                i, j = first.pop(), second.pop()
                if self.is_free(i, j):
                    self.add(i, j)

    def match_replaced(self) -> None:
        """Matches nodes of different opcodes that take and give the same."""
        for i, node in enumerate(self.a.nodes):
            if self.to_b[i] != NONE or not node.users or not node.operands:
                continue
            operands = [self.to_b[o] for o in node.operands]
            if NONE in operands:
                continue
            users = {(self.to_b[u], p) for u, p in node.users}
            for j, _ in self.b.nodes[operands[0]].users:
                other = self.b.nodes[j]
                if (
                    self.to_a[j] == NONE
                    and list(other.operands) == operands
                    and set(other.users) == users
                ):
                    self.add(i, j)
                    break

    def drop_strangers(self) -> None:
        """Undoes matches of nodes that differ and have no neighbor in common, and of
        differing constants, and what is made of them, without a user in common."""
        for i in reversed(range(len(self.to_b))):
            j = self.to_b[i]
            first, second = self.a.nodes[i], self.b.nodes[max(j, 0)]
            if j == NONE or first.opcode in ("parameter", OUTPUT):
                continue
            fixed = self.fixed[0][i] and self.fixed[1][j]
            if fixed and self.values[0][i] == self.values[1][j]:
                continue
            if not fixed and self.exact[0][i] == self.exact[1][j]:
                continue
            near = {self.to_b[o] for o in first.operands} & set(second.operands)
            users = {self.to_b[u] for u, _ in first.users}
            users &= {u for u, _ in second.users}
            if not users and (fixed or not near):
                self.to_b[i] = self.to_a[j] = NONE

    # -- fingerprints -----------------------------------------------------------

    def down(
        self, labels: Sequence[Sequence[int]], leaves: Sequence[dict[int, Hashable]]
    ) -> tuple[list[int], list[int]]:
        """For each node a number for what it is computed from.

        Args:
            labels: of the nodes.
            leaves: what certain nodes are called instead.
        """
        found: tuple[list[int], list[int]] = ([], [])
        for side, graph in enumerate((self.a, self.b)):
            hashes, named = found[side], leaves[side]
            for node in graph.nodes:
                key: Hashable = named.get(node.index)
                if key is None:
                    parts = [hashes[o] for o in node.operands]
                    if node.opcode in COMMUTATIVE:
                        parts.sort()
                    key = (labels[side][node.index], tuple(parts))
                hashes.append(self.intern(("down", key)))
        return found

    def up(
        self,
        labels: Sequence[Sequence[int]],
        outputs: Sequence[Callable[[Node, int], Hashable]],
    ) -> tuple[list[int], list[int]]:
        """For each node a number for what becomes of it.

        Args:
            labels: of the nodes.
            outputs: what to call a position among a module's results.
        """
        found: tuple[list[int], list[int]] = ([], [])
        for side, graph in enumerate((self.a, self.b)):
            hashes = [0] * len(graph.nodes)
            for node in reversed(graph.nodes):
                uses = []
                for user, position in node.users:
                    there = graph.nodes[user]
                    place = (
                        outputs[side](there, position)
                        if there.opcode == OUTPUT
                        else _position(there, position)
                    )
                    uses.append(self.intern(("use", hashes[user], place)))
                uses.sort()
                key = ("up", labels[side][node.index], tuple(uses))
                hashes[node.index] = self.intern(key)
            found[side].extend(hashes)
        return found


def _position(node: Node, position: int) -> int:
    """An operand's position, as far as it matters."""
    return 0 if node.opcode in COMMUTATIVE else position


def _fixed(graph: Graph) -> list[bool]:
    """For each node whether it is the same in every run: made of constants alone."""
    fixed: list[bool] = []
    for node in graph.nodes:
        if node.opcode in ("constant", "iota"):
            fixed.append(True)
        else:
            ops = node.operands
            fixed.append(bool(ops) and all(fixed[o] for o in ops))
    return fixed


def match(a: Graph, b: Graph) -> Matching:
    """Matches two graphs: what is the same first, then what changed a little."""
    matching = Matching(a, b)
    pairs = matching.parameters = match_parameters(a, b)
    leaves: tuple[dict[int, Hashable], ...] = tuple(
        {p[side]: ("parameter", k) for k, p in enumerate(pairs)} for side in (0, 1)
    )
    for side, graph in enumerate((a, b)):  # of one module only
        for number, index in graph.parameters.items():
            leaves[side].setdefault(index, ("parameter of", side, number))
    outputs = _output_names(a, b, pairs)
    for i, j in pairs:
        matching.add(i, j)
    tops = tuple([n.index for n in g.nodes if n.opcode == OUTPUT] for g in (a, b))
    if len(tops[0]) == len(tops[1]) == 1:
        matching.add(tops[0][0], tops[1][0])
    for labels in (matching.exact, matching.loose):
        down = matching.down(labels, leaves)
        up = matching.up(labels, outputs)
        if labels is matching.exact:
            matching.values = down
        else:
            matching.loose_values = down
        both = tuple(
            [
                matching.intern(("both", *key))
                for key in zip(down[side], up[side], strict=True)
            ]
            for side in (0, 1)
        )
        # Constants are the same everywhere: what uses them tells them apart.
        for fixed in (False, True):
            matching.match_groups(both, fixed)
            matching.match_groups(down, fixed)
            matching.match_groups(up, fixed)
            matching.spread_again(labels)
    matching.match_replaced()
    matching.spread_again(matching.loose)
    matching.match_replaced()
    matching.drop_strangers()
    return matching


def _output_names(
    a: Graph, b: Graph, parameters: list[tuple[int, int]]
) -> list[Callable[[Node, int], Hashable]]:
    """What to call each position among the results: its number where both modules have
    equally many, else the parameter whose buffer it takes."""
    counts = []
    for graph in (a, b):
        found = [n for n in graph.nodes if n.opcode == OUTPUT]
        counts.append(len(found[0].operands) if found else 0)
    if counts[0] == counts[1]:
        return [lambda node, position: position] * 2
    functions = []
    for side, graph in enumerate((a, b)):
        numbers = {pair[side]: k for k, pair in enumerate(parameters)}
        names = {
            alias.output[0]: numbers.get(graph.parameters.get(alias.parameter, NONE))
            for alias in graph.module.input_output_alias
            if len(alias.output) == 1
        }
        functions.append(lambda node, position, names=names: names.get(position))
    return functions
