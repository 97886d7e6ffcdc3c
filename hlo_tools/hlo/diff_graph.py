"""A module as one flat graph of values.

Fusions, calls, loops and branches are looked into; tuples are taken apart. So how a
compiler grouped operations, and in what order a fusion or a loop takes its operands,
is not in the graph; each node says which instruction it is and in which call.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from hlo_tools.hlo import diff_labels
from hlo_tools.hlo.ir import UNDEFINED, HloComputation, HloInstruction, HloModule

# Instructions that only call: what they call takes their place.
_CALLS = frozenset(("fusion", "call", "async-start", "call-start"))
# Instructions that only wait for what their operand began.
_WAITS = frozenset(("async-done", "async-update", "call-done", "call-update"))
# Nodes up to which shared computations are looked into at each of their calls.
MAX_NODES = 2_000_000

OUTPUT = "output"


@dataclass(slots=True, eq=False)
class Node:
    """A value.

    Attributes:
        index: in the graph; operands come before.
        instruction: that computes it.
        instance: number of the call that the instruction is in.
        opcode: the instruction's, or what part of it this is ("while carry").
        operands: indices of nodes.
        exact, loose: labels, of which equal ones are the same object.
        users: (node, operand position), in order.
    """

    index: int
    instruction: HloInstruction
    instance: int
    opcode: str
    operands: tuple[int, ...]
    exact: Hashable
    loose: Hashable
    users: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Instance:
    """One call of a computation.

    Attributes:
        number: 0 is the entry.
        computation: that is called.
        caller: the instruction that calls it; None for the entry.
        parent: number of the call that the caller is in.
        operands: values that it is called with.
        nodes: indices of the nodes in it.
    """

    number: int
    computation: HloComputation
    caller: HloInstruction | None
    parent: int
    operands: list[Any] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Graph:
    """The values of a module.

    Attributes:
        module: that it is of.
        nodes: operands first.
        instances: calls, by number.
        parameters: nodes of the entry's parameters, by number.
    """

    module: HloModule
    nodes: list[Node] = field(default_factory=list)
    instances: list[Instance] = field(default_factory=list)
    parameters: dict[int, int] = field(default_factory=dict)

    def op_name(self, node: Node) -> str:
        """Path of names in the user's program; that of a function that was lowered by
        itself begins where it is called."""
        name = node.instruction.op_name
        number = node.instance
        while self.instances[number].caller is not None:
            caller = self.instances[number].caller
            outer = caller.op_name if caller is not None else ""
            if caller is not None and caller.opcode == "call" and outer:
                if name.split("/")[0] != outer.split("/")[0]:
                    name = f"{outer}/{name}" if name else outer
            number = self.instances[number].parent
        return name


def flatten(module: HloModule) -> Graph:
    """The graph of a module: of its entry, then of what nothing calls."""
    builder = _Builder(module)
    entry = module.entry
    roots = [entry] if entry is not None else []
    roots += [c for c in module.uncalled if c is not entry]
    for computation in roots:
        builder.add_root(computation, computation is entry)
    graph = builder.graph
    for node in graph.nodes:
        for position, operand in enumerate(node.operands):
            graph.nodes[operand].users.append((node.index, position))
    return graph


# A value is a node's index, or a list of values for a tuple.
_Value = Any


class _Builder:
    def __init__(self, module: HloModule):
        self.graph = Graph(module)
        self._labels: dict[int, tuple[Hashable, Hashable]] = {}
        self._elements: dict[tuple[int, int], int] = {}

    def add_root(self, computation: HloComputation, is_entry: bool) -> None:
        instance = self.instance(computation, None, 0, [])
        parameters: dict[int, _Value] = {}
        for instruction in computation.parameters:
            node = self.node(instruction, instance, ())
            number = instruction.parameter_number or 0
            parameters[number] = node
            if is_entry:
                self.graph.parameters[number] = node
        value = self.body(instance, parameters)
        root = computation.root
        if root is not None:
            outputs = value if isinstance(value, list) else [value]
            operands = tuple(self.one(v, root, instance) for v in outputs)
            label = (OUTPUT, is_entry)
            self.add(root, instance, OUTPUT, operands, label, label)

    def instance(
        self,
        computation: HloComputation,
        caller: HloInstruction | None,
        parent: int,
        operands: list[_Value],
    ) -> Instance:
        number = len(self.graph.instances)
        instance = Instance(number, computation, caller, parent, operands)
        self.graph.instances.append(instance)
        return instance

    def body(self, instance: Instance, parameters: dict[int, _Value]) -> _Value:
        """Adds the nodes of a computation; the value of its root."""
        values: dict[str, _Value] = {}
        for instruction in _operands_first(instance.computation):
            if instruction.opcode == "parameter":
                number = instruction.parameter_number
                value = parameters.get(-1 if number is None else number)
                if value is None:
                    value = self.node(instruction, instance, ())
            else:
                value = self.value(instruction, instance, values)
            values[instruction.name] = value
        root = instance.computation.root
        return None if root is None else values[root.name]

    def value(
        self, instruction: HloInstruction, instance: Instance, values: dict[str, _Value]
    ) -> _Value:
        for operand in instruction.operands:
            if operand.name not in values:  # not defined, or in a cycle
                values[operand.name] = self.node(operand, instance, ())
        operands = [values[operand.name] for operand in instruction.operands]
        opcode = instruction.opcode
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element" and operands:
            return self.element(instruction, instance, operands[0])
        if opcode in _WAITS and operands:
            return operands[0]
        if len(self.graph.nodes) < MAX_NODES:
            if opcode in _CALLS and len(instruction.called) == 1:
                return self.call(instruction, instance, operands)
            if opcode == "while" and len(instruction.called) == 2 and operands:
                return self.loop(instruction, instance, operands[0])
            if opcode == "conditional" and instruction.called and operands:
                return self.branches(instruction, instance, operands)
        flat = [self.one(v, instruction, instance) for v in operands]
        return self.node(instruction, instance, tuple(flat))

    def element(
        self, instruction: HloInstruction, instance: Instance, value: _Value
    ) -> _Value:
        text = instruction.attributes.get("index", "")
        index = int(text) if text.isdigit() else -1
        if isinstance(value, list):
            if 0 <= index < len(value):
                return value[index]
            return self.node(instruction, instance, ())
        known = self._elements.get((value, index))
        if known is None:
            known = self.node(instruction, instance, (value,))
            self._elements[value, index] = known
        return known

    def call(
        self, instruction: HloInstruction, instance: Instance, operands: list[_Value]
    ) -> _Value:
        computation = instruction.called[0]
        inner = self.instance(computation, instruction, instance.number, operands)
        value = self.body(inner, dict(enumerate(operands)))
        if value is None:
            flat = [self.one(v, instruction, instance) for v in operands]
            return self.node(instruction, instance, tuple(flat))
        return value

    def loop(
        self, instruction: HloInstruction, instance: Instance, initial: _Value
    ) -> _Value:
        """Values that a loop carries are nodes, without their place in its tuple; one
        that it does not change is the value it began with."""
        module, names = self.graph.module, instruction.attributes
        condition, body = (
            module.computations_by_name.get(names.get(key, "").removeprefix("%"))
            for key in ("condition", "body")
        )
        if condition is None or body is None:
            whole = self.one(initial, instruction, instance)
            return self.node(instruction, instance, (whole,))
        carried = self.carry(instruction, instance, initial, body)
        ends = []
        for computation in (condition, body):
            inner = self.instance(computation, instruction, instance.number, [initial])
            ends.append(self.body(inner, {0: carried}))
        stop = () if ends[0] is None else (self.one(ends[0], instruction, instance),)
        return self.zip(
            [carried, ends[1]],
            lambda parts: self.loop_result(instruction, instance, parts, stop),
        )

    def carry(
        self,
        instruction: HloInstruction,
        instance: Instance,
        initial: _Value,
        body: HloComputation,
    ) -> _Value:
        label = ("while carry",)

        def part(value: int) -> int:
            return self.add(instruction, instance, label[0], (value,), label, label)

        if not isinstance(initial, list):
            return part(initial)
        constant = _unchanged(body)
        return [
            value if index in constant else self.map(value, part)
            for index, value in enumerate(initial)
        ]

    def loop_result(
        self,
        instruction: HloInstruction,
        instance: Instance,
        parts: list[_Value],
        stop: tuple[int, ...],
    ) -> int:
        operands = tuple(self.one(p, instruction, instance) for p in parts)
        if len(set(operands)) == 1 and len(operands) == 2:
            return operands[0]  # carried and never changed
        label = ("while",)
        return self.add(instruction, instance, label[0], operands + stop, label, label)

    def branches(
        self, instruction: HloInstruction, instance: Instance, operands: list[_Value]
    ) -> _Value:
        chooser = (self.one(operands[0], instruction, instance),)
        ends = []
        for number, computation in enumerate(instruction.called):
            given = operands[number + 1 : number + 2]
            inner = self.instance(computation, instruction, instance.number, given)
            ends.append(self.body(inner, dict(enumerate(given))))
        label = ("conditional", len(ends))
        return self.zip(
            ends,
            lambda parts: self.add(
                instruction,
                instance,
                "conditional",
                chooser + tuple(self.one(p, instruction, instance) for p in parts),
                label,
                label,
            ),
        )

    def map(self, value: _Value, function: Any) -> _Value:
        if isinstance(value, list):
            return [self.map(part, function) for part in value]
        return function(value)

    def zip(self, values: list[_Value], function: Any) -> _Value:
        """`function` of each group of parts that lie at the same place in tuples."""
        known = [v for v in values if v is not None]
        lists = [v for v in known if isinstance(v, list)]
        if known and len(lists) == len(known) and len({len(v) for v in lists}) == 1:
            return [
                self.zip(list(parts), function) for parts in zip(*lists, strict=True)
            ]
        return function(known)

    def one(
        self, value: _Value, instruction: HloInstruction, instance: Instance
    ) -> int:
        """A value as one node: a tuple that something takes whole is one."""
        if not isinstance(value, list):
            return value
        parts = tuple(self.one(v, instruction, instance) for v in value)
        label = ("tuple", len(parts))
        return self.add(instruction, instance, "tuple", parts, label, label)

    def node(
        self, instruction: HloInstruction, instance: Instance, operands: tuple[int, ...]
    ) -> int:
        both = self._labels.get(id(instruction))
        if both is None:
            called = diff_labels.called_labels(instruction)
            both = self._labels[id(instruction)] = diff_labels.labels(
                instruction, called
            )
        return self.add(instruction, instance, instruction.opcode, operands, *both)

    def add(
        self,
        instruction: HloInstruction,
        instance: Instance,
        opcode: str,
        operands: tuple[int, ...],
        exact: Hashable,
        loose: Hashable,
    ) -> int:
        index = len(self.graph.nodes)
        node = Node(index, instruction, instance.number, opcode, operands, exact, loose)
        self.graph.nodes.append(node)
        instance.nodes.append(index)
        return index


def _unchanged(body: HloComputation) -> set[int]:
    """Places of a loop's tuple that its body passes on as they are."""
    root = body.root
    if root is None or root.opcode != "tuple":
        return set()
    return {
        index
        for index, value in enumerate(root.operands)
        if value.opcode == "get-tuple-element"
        and value.attributes.get("index") == str(index)
        and value.operands[0].opcode == "parameter"
    }


def _operands_first(computation: HloComputation) -> list[HloInstruction]:
    """The instructions, each after its operands; in the order of the text if that
    is so there. An operand in a cycle comes where it may."""
    done: set[str] = set()
    ordered: list[HloInstruction] = []
    for instruction in computation:
        stack, open_names = [instruction], set()
        while stack:
            top = stack[-1]
            if top.name in done:
                stack.pop()
                continue
            open_names.add(top.name)
            waiting = [
                o
                for o in top.operands
                if o.name not in done
                and o.opcode != UNDEFINED
                and o.name not in open_names
            ]
            if waiting:
                stack.extend(reversed(waiting))
            else:
                done.add(top.name)
                ordered.append(top)
                stack.pop()
    return ordered
