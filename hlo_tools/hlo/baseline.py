"""A small fingerprint of a program, to be kept beside its source and compared in CI.

It holds what the program computes, not what things are called: renamed or reordered
instructions, other numbers and other metadata leave it as it is. Names are in it only
to say where a change is.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import Any

from hlo_tools.errors import HloToolsError, UnknownNameError
from hlo_tools.hlo.cost import COLLECTIVES
from hlo_tools.hlo.diff_changes import VIRTUAL
from hlo_tools.hlo.diff_graph import OUTPUT, Graph, Node, flatten
from hlo_tools.hlo.diff_labels import COMMUTATIVE, digest
from hlo_tools.hlo.ir import HloModule

VERSION = 1
# What a fingerprint can leave out.
ASPECTS = ("shapes", "layouts", "schedule", "fusions", "aliasing", "constants")


class BaselineError(HloToolsError):
    """A baseline that can not be read or compared with."""


def fingerprint(module: HloModule, ignore: Collection[str] = ()) -> dict[str, Any]:
    """The fingerprint of a module, JSON-ready.

    Args:
        module: any.
        ignore: some of `ASPECTS`, to be left out.

    Raises:
        UnknownNameError: a word in `ignore` is no such aspect.
    """
    for aspect in ignore:
        if aspect not in ASPECTS:
            raise UnknownNameError("aspect of a baseline", aspect, ASPECTS)
    graph = flatten(module)
    labels = [_label(node, ignore) for node in graph.nodes]
    values = _values(graph, labels)
    outputs = [values[o] for n in graph.nodes if n.opcode == OUTPUT for o in n.operands]
    whole: dict[str, str] = {
        "graph": digest(sorted(values)),
        "results": digest(outputs),
    }
    if "fusions" not in ignore:
        whole["fusions"] = digest(_fusions(graph, values))
    if "layouts" not in ignore:
        whole["layouts"] = digest(
            sorted(
                (value, str(node.instruction.shape))
                for node, value in zip(graph.nodes, values, strict=True)
            )
        )
    if "schedule" not in ignore and module.is_scheduled:
        whole["schedule"] = digest(_schedule(graph, values))
    if "aliasing" not in ignore:
        whole["aliasing"] = digest(sorted(map(tuple, module.input_output_alias)))
    return {
        "version": VERSION,
        "ignore": sorted(ignore),
        "instructions": sum(map(len, module.computations)),
        "hashes": whole,
        "collectives": _collectives(module),
        "parts": _parts(graph, labels, "shapes" in ignore),
    }


def dumps(fingerprint: Mapping[str, Any]) -> str:
    """The fingerprint as JSON, a row a line, for reading in a code review."""
    lines = []
    for key, value in fingerprint.items():
        if isinstance(value, dict) and value:
            rows = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
            lines.append(f"{json.dumps(key)}: {{\n" + ",\n".join(rows) + "\n }")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def load(file: str | Path) -> dict[str, Any]:
    """Reads a baseline.

    Raises:
        BaselineError: it is none, or of another version.
    """
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        hint = "; --update writes it" if isinstance(error, FileNotFoundError) else ""
        message = f"{file}: {error.strerror or error}{hint}"
        raise BaselineError(message) from error
    except ValueError as error:
        raise BaselineError(f"{file}: not JSON: {error}") from error
    if not isinstance(found, dict) or "hashes" not in found:
        raise BaselineError(f"{file}: not a baseline; --update writes one")
    if found.get("version") != VERSION:
        raise BaselineError(
            f"{file}: version {found.get('version')}, expected {VERSION}; "
            "--update writes it anew"
        )
    return found


def _label(node: Node, ignore: Collection[str]) -> Hashable:
    if "shapes" in ignore:
        return node.loose
    if "constants" in ignore and node.instruction.opcode == "constant":
        return ("constant", str(node.instruction.shape.without_layout()))
    return node.exact


def _values(graph: Graph, labels: list[Hashable]) -> list[str]:
    """For each node a digest of all that it is computed from."""
    values: list[str] = []
    numbers = {index: number for number, index in graph.parameters.items()}
    for node, label in zip(graph.nodes, labels, strict=True):
        parts = [values[o] for o in node.operands]
        if node.opcode in COMMUTATIVE:
            parts.sort()
        values.append(digest((label, numbers.get(node.index), parts)))
    return values


def _fusions(graph: Graph, values: list[str]) -> list[list[str]]:
    return sorted(
        sorted(values[i] for i in instance.nodes)
        for instance in graph.instances
        if instance.caller is not None and instance.caller.opcode == "fusion"
    )


def _schedule(graph: Graph, values: list[str]) -> list[list[str]]:
    """Values in the order of the text, for all but fusions."""
    inside: dict[int, list[str]] = collections.defaultdict(list)
    for instance in graph.instances:
        if instance.caller is not None and instance.caller.opcode == "fusion":
            inside[id(instance.caller)] += sorted(values[i] for i in instance.nodes)
    orders = []
    for instance in graph.instances:
        if instance.caller is not None and instance.caller.opcode == "fusion":
            continue
        known: dict[int, list[str]] = collections.defaultdict(list)
        for i in instance.nodes:
            known[id(graph.nodes[i].instruction)].append(values[i])
        orders.append(
            [
                digest(known.get(id(i), []) + inside.get(id(i), []))
                for i in instance.computation
            ]
        )
    return sorted(orders)


def _collectives(module: HloModule) -> dict[str, int]:
    counts: collections.Counter[str] = collections.Counter()
    for instruction in module.instructions():
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            counts[kind] += 1
    return dict(sorted(counts.items()))


def _parts(
    graph: Graph, labels: list[Hashable], without_sizes: bool
) -> dict[str, dict[str, Any]]:
    """For each scope of op_names a digest of what is done in it, and how often each
    operation is."""
    digests: dict[str, list[str]] = collections.defaultdict(list)
    counts: dict[str, collections.Counter[str]] = {}
    for node, label in zip(graph.nodes, labels, strict=True):
        if node.opcode in (*VIRTUAL, OUTPUT, "parameter"):
            continue
        scope = graph.op_name(node).rpartition("/")[0]
        operands = [labels[o] for o in node.operands]
        if node.opcode in COMMUTATIVE:
            operands.sort(key=repr)
        digests[scope].append(digest((label, operands)))
        shape = node.instruction.shape
        sizes = shape.element_type if without_sizes else str(shape.without_layout())
        counts.setdefault(scope, collections.Counter())[f"{node.opcode} {sizes}"] += 1
    return {
        scope: {
            "hash": digest(sorted(parts)),
            "operations": dict(sorted(counts[scope].items())),
        }
        for scope, parts in sorted(digests.items())
    }
