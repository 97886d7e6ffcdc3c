"""How two compilers grouped and ordered the same operations.

Fusions, the order of their operands, calls, the schedule, layouts and annotations are
compared on matched values and calls.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterator
from typing import Any

from hlo_tools.hlo import diff_labels
from hlo_tools.hlo.diff_changes import VIRTUAL
from hlo_tools.hlo.diff_graph import OUTPUT, Graph, Instance
from hlo_tools.hlo.diff_match import NONE, Matching
from hlo_tools.hlo.diff_result import InstructionRef, Note
from hlo_tools.hlo.ir import HloInstruction

_Pair = tuple[HloInstruction, HloInstruction]
_EXAMPLES = 3
# What an operand-free value says about where it is computed: nothing.
_ANYWHERE = frozenset(("constant", "iota", "broadcast", "parameter"))


class Grouping:
    """Calls of the two modules that match, and what is in other ones.

    Attributes:
        to_b: for each call of a its counterpart's number, or `NONE`.
        moved: matched instructions in calls that are no counterparts.
    """

    def __init__(self, matching: Matching):
        self.matching = matching
        self.a, self.b = matching.a, matching.b
        self.to_b = _match_instances(matching)
        self.to_a = [NONE] * len(self.b.instances)
        for x, y in enumerate(self.to_b):
            if y != NONE:
                self.to_a[y] = x
        self.moved: list[_Pair] = []
        for i, j in enumerate(matching.to_b):
            if j == NONE:
                continue
            first, second = self.a.nodes[i], self.b.nodes[j]
            if first.opcode in _ANYWHERE or first.opcode in VIRTUAL:
                continue
            if self.to_b[first.instance] != second.instance:
                self.moved.append((first.instruction, second.instruction))

    def callers(self) -> Iterator[tuple[Instance, Instance]]:
        """The matched calls, without the entry."""
        for x, y in enumerate(self.to_b):
            if y == NONE:
                continue
            first, second = self.a.instances[x], self.b.instances[y]
            if first.caller is not None and second.caller is not None:
                yield first, second

    def pairs(self) -> Iterator[_Pair]:
        """Matched instructions: values, and what calls."""
        seen = set()
        for i, j in enumerate(self.matching.to_b):
            if j == NONE:
                continue
            first, second = self.a.nodes[i], self.b.nodes[j]
            if first.opcode in (*VIRTUAL, OUTPUT):
                continue
            pair = first.instruction, second.instruction
            if (id(pair[0]), id(pair[1])) not in seen:
                seen.add((id(pair[0]), id(pair[1])))
                yield pair
        for first, second in self.callers():
            if first.caller is not None and second.caller is not None:
                pair = first.caller, second.caller
                if (id(pair[0]), id(pair[1])) not in seen:
                    seen.add((id(pair[0]), id(pair[1])))
                    yield pair

    def regrouped(self) -> list[_Pair]:
        """Instructions in another fusion, and fusions of another kind."""
        fused = [
            pair for pair in self.moved if _is_fused(pair[0]) or _is_fused(pair[1])
        ]
        for first, second in self.callers():
            x, y = first.caller, second.caller
            if x is None or y is None or "fusion" not in (x.opcode, y.opcode):
                continue
            kinds = x.attributes.get("kind"), y.attributes.get("kind")
            if x.opcode != y.opcode or kinds[0] != kinds[1]:
                fused.append((x, y))
        return fused

    def relocated(self) -> list[_Pair]:
        """Instructions in another computation that is no fusion."""
        return [
            pair
            for pair in self.moved
            if not (_is_fused(pair[0]) or _is_fused(pair[1]))
        ]

    def reordered_calls(self) -> list[_Pair]:
        """Calls with the same operands in another order."""
        found = []
        for first, second in self.callers():
            x = [self._operand(0, value) for value in first.operands]
            y = [self._operand(1, value) for value in second.operands]
            if x != y and sorted(x, key=repr) == sorted(y, key=repr):
                if first.caller is not None and second.caller is not None:
                    found.append((first.caller, second.caller))
        return found

    def _operand(self, side: int, value: Any) -> Any:
        """An operand as the number of what it is computed from, on both sides."""
        if isinstance(value, list):
            return tuple(self._operand(side, part) for part in value)
        index = value if side == 0 else self.matching.to_a[value]
        return ("only in b", value) if index == NONE else self.matching.values[0][index]

    def rescheduled(self) -> list[_Pair]:
        """Instructions that run at another time than those around them."""
        modules = self.a.module, self.b.module
        if not (modules[0].is_scheduled and modules[1].is_scheduled):
            return []
        partners = {id(x): y for x, y in self.pairs()}
        found: list[_Pair] = []
        for x, y in enumerate(self.to_b):
            if y == NONE:
                continue
            first, second = self.a.instances[x], self.b.instances[y]
            if first.caller is not None and first.caller.opcode == "fusion":
                continue
            place = {id(i): n for n, i in enumerate(second.computation)}
            here = [
                (place[id(partners[id(i)])], i)
                for i in first.computation
                if id(i) in partners and id(partners[id(i)]) in place
            ]
            late = _out_of_order([position for position, _ in here])
            found += [(here[n][1], partners[id(here[n][1])]) for n in late]
        return found


def _is_fused(instruction: HloInstruction) -> bool:
    """Whether an instruction is in a fusion's computation."""
    computation = instruction.computation
    if computation is None or computation.module is None:
        return False
    return computation.name in fused_names(computation.module)


_FUSED: dict[int, tuple[Any, set[str]]] = {}


def fused_names(module: Any) -> set[str]:
    """Names of the computations that fusions call."""
    known = _FUSED.get(id(module))
    if known is None or known[0] is not module:
        names = {
            name
            for instruction in module.instructions()
            if instruction.opcode == "fusion"
            for name in instruction.called_names
        }
        _FUSED.clear()
        known = _FUSED[id(module)] = (module, names)
    return known[1]


def _match_instances(matching: Matching) -> list[int]:
    """Calls that have most of their matched values in common."""
    votes: collections.Counter[tuple[int, int]] = collections.Counter()
    for i, j in enumerate(matching.to_b):
        if j == NONE:
            continue
        first, second = matching.a.nodes[i], matching.b.nodes[j]
        weight = 1 if first.opcode in _ANYWHERE else 1000
        votes[first.instance, second.instance] += weight
    to_b = [NONE] * len(matching.a.instances)
    taken = set()
    if to_b and matching.b.instances:
        to_b[0] = 0
        taken.add(0)
    for (x, y), _ in sorted(votes.items(), key=lambda item: (-item[1], item[0])):
        if to_b[x] == NONE and y not in taken and x:
            to_b[x] = y
            taken.add(y)
    return to_b


def _out_of_order(positions: list[int]) -> list[int]:
    """Indices outside of the longest increasing subsequence."""
    tails: list[int] = []
    at: list[int] = []
    before = [NONE] * len(positions)
    for n, position in enumerate(positions):
        k = bisect.bisect_left(tails, position)
        if k == len(tails):
            tails.append(position)
            at.append(n)
        else:
            tails[k] = position
            at[k] = n
        before[n] = at[k - 1] if k else NONE
    kept = set()
    n = at[-1] if at else NONE
    while n != NONE:
        kept.add(n)
        n = before[n]
    return [n for n in range(len(positions)) if n not in kept]


def note(aspect: str, pairs: list[_Pair], text: str) -> Note:
    """A note on pairs of instructions."""
    examples = tuple(
        (InstructionRef.of(x), InstructionRef.of(y)) for x, y in pairs[:_EXAMPLES]
    )
    return Note(aspect, len(pairs), text, examples)


def annotated_otherwise(grouping: Grouping, keys: tuple[str, ...]) -> list[_Pair]:
    """Matched instructions of which one of the attributes `keys` differs."""
    return [
        (x, y)
        for x, y in grouping.pairs()
        if any(
            diff_labels.attribute_value(key, x.attributes.get(key, ""))
            != diff_labels.attribute_value(key, y.attributes.get(key, ""))
            for key in keys
        )
    ]


def other_layouts(grouping: Grouping) -> list[_Pair]:
    """Matched instructions whose results lie otherwise in memory."""
    return [
        (x, y)
        for x, y in grouping.pairs()
        if [s.layout for s in x.shape.arrays()] != [s.layout for s in y.shape.arrays()]
    ]


def other_aliases(matching: Matching) -> tuple[int, list[str]]:
    """Results whose buffer is another parameter's.

    Returns:
        How many, and a few of them in words.
    """
    graphs: tuple[Graph, Graph] = matching.a, matching.b
    aliases: list[set[tuple[Any, ...]]] = []
    for side, graph in enumerate(graphs):
        names = {pair[side]: k for k, pair in enumerate(matching.parameters)}
        aliases.append(
            {
                (
                    alias.output,
                    names.get(graph.parameters.get(alias.parameter, NONE)),
                    alias.index,
                    alias.kind,
                )
                for alias in graph.module.input_output_alias
            }
        )
    other = aliases[0] ^ aliases[1]
    outputs = sorted({entry[0] for entry in other})
    return len(outputs), [f"result {list(output)}" for output in outputs[:3]]
