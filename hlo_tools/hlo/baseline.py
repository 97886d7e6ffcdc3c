"""A small fingerprint of a program, to be kept beside its source and compared in CI.

It holds what the program computes, not what things are called: renamed or reordered
instructions, other numbers and other metadata leave it as it is. Names are in it only
to say where a change is.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlo_tools.errors import HloToolsError, UnknownNameError
from hlo_tools.hlo.diff_changes import VIRTUAL
from hlo_tools.hlo.diff_graph import OUTPUT, Graph, Node, flatten
from hlo_tools.hlo.diff_labels import COMMUTATIVE, digest
from hlo_tools.hlo.diff_text import count
from hlo_tools.hlo.ir import HloModule

VERSION = 1
# What a fingerprint can leave out.
ASPECTS = ("shapes", "layouts", "schedule", "fusions", "aliasing", "constants")
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_WHOLE = {
    "graph": "the graph: what is computed from what",
    "results": "the results or their order",
    "fusions": "how operations are grouped in fusions",
    "layouts": "layouts in memory",
    "schedule": "the order that instructions run in",
    "aliasing": "which results take the buffers of which parameters",
}
_SHOWN = 30


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
        "operations": _operations(graph, "shapes" in ignore),
        "collectives": _collectives(module),
        "parts": _parts(graph, labels),
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


@dataclass(frozen=True)
class BaselineDiff:
    """What differs from a baseline.

    Attributes:
        reasons: in words, what is not the same.
        operations: operation to (count before, count now, where).
        collectives: collective to (count before, count now).
        where: parts of the program, by their op_names, that are not the same.
    """

    reasons: tuple[str, ...] = ()
    operations: Mapping[str, tuple[int, int, str]] = ()  # type: ignore[assignment]
    collectives: Mapping[str, tuple[int, int]] = ()  # type: ignore[assignment]
    where: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        return not self.reasons

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "same": self.is_same,
            "reasons": list(self.reasons),
            "operations": [
                {"operation": key, "before": old, "now": new, "where": where}
                for key, (old, new, where) in dict(self.operations).items()
            ],
            "collectives": [
                {"collective": key, "before": old, "now": new}
                for key, (old, new) in dict(self.collectives).items()
            ],
            "where": list(self.where),
        }

    def text(self) -> str:
        """The differences for a reader."""
        if self.is_same:
            return "same program as the baseline\n"
        lines = ["differs from the baseline:"]
        lines += [f"  {reason}" for reason in self.reasons]
        collectives = dict(self.collectives)
        if collectives:
            lines.append("collectives:")
            for key, (old, new) in collectives.items():
                lines.append(f"  {key}: {old} -> {new}")
        operations = dict(self.operations)
        if operations:
            lines.append("operations:")
        for key, (old, new, where) in list(operations.items())[:_SHOWN]:
            sign = "+" if new > old else "-"
            at = f"  ({where})" if where else ""
            lines.append(f"  {sign}{abs(new - old)} {key}{at}")
        if len(operations) > _SHOWN:
            lines.append(f"  ... and {len(operations) - _SHOWN} more")
        if self.where:
            lines.append("where:")
            lines += [f"  {name}" for name in self.where[:_SHOWN]]
            if len(self.where) > _SHOWN:
                lines.append(f"  ... and {len(self.where) - _SHOWN} more")
        lines.append(
            "if that is meant: hlo-tools diff FILE --baseline BASELINE --update"
        )
        return "\n".join(lines) + "\n"


def compare(
    baseline: Mapping[str, Any], now: Mapping[str, Any], ignore: Collection[str] = ()
) -> BaselineDiff:
    """Compares a program's fingerprint with a baseline.

    Args:
        baseline: as `load` returns it.
        now: as `fingerprint` returns it, with the baseline's `ignore`.
        ignore: what `now` was made without.

    Raises:
        BaselineError: the two leave out different aspects.
    """
    if sorted(ignore) != baseline["ignore"]:
        words = ",".join(baseline["ignore"]) or "nothing"
        raise BaselineError(
            f"the baseline was written with --ignore of {words}, got "
            f"{','.join(sorted(ignore)) or 'nothing'}: use the same, or --update"
        )
    before, after = baseline["hashes"], now["hashes"]
    changed = [k for k in _WHOLE if before.get(k) != after.get(k)]
    if "graph" in changed:  # what follows from it says nothing more
        changed = [k for k in changed if k not in ("results", "layouts")]
    reasons = [_WHOLE[key] for key in changed]
    if not reasons:
        return BaselineDiff()
    if baseline["instructions"] != now["instructions"]:
        old, new = baseline["instructions"], now["instructions"]
        reasons.append(f"{count(old, 'instruction')} before, {new} now")
    operations = _changed_rows(baseline["operations"], now["operations"])
    if "graph" in changed and not operations:
        reasons.append("the same operations, but with other operands or attributes")
    old, new = baseline["collectives"], now["collectives"]
    collectives = {
        key: (old.get(key, 0), new.get(key, 0))
        for key in sorted(old.keys() | new.keys())
        if old.get(key, 0) != new.get(key, 0)
    }
    where = _changed_parts(baseline["parts"], now["parts"])
    return BaselineDiff(tuple(reasons), operations, collectives, where)


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


def _operations(graph: Graph, without_sizes: bool) -> dict[str, list[Any]]:
    """For each kind of operation how many there are, and where the first is."""
    rows: dict[str, list[Any]] = {}
    for node in graph.nodes:
        if node.opcode in (*VIRTUAL, OUTPUT):
            continue
        shape = node.instruction.shape
        sizes = shape.element_type if without_sizes else str(shape.without_layout())
        row = rows.setdefault(f"{node.opcode} {sizes}", [0, ""])
        row[0] += 1
        row[1] = row[1] or graph.op_name(node)
    return dict(sorted(rows.items()))


def _collectives(module: HloModule) -> dict[str, int]:
    counts: collections.Counter[str] = collections.Counter()
    for instruction in module.instructions():
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            counts[kind] += 1
    return dict(sorted(counts.items()))


def _parts(graph: Graph, labels: list[Hashable]) -> dict[str, str]:
    """For each scope of op_names a digest of what is done in it."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for node, label in zip(graph.nodes, labels, strict=True):
        if node.opcode in ("parameter", "constant", OUTPUT):
            continue
        scope = graph.op_name(node).rpartition("/")[0]
        operands = [labels[o] for o in node.operands]
        if node.opcode in COMMUTATIVE:
            operands.sort(key=repr)
        found[scope].append(digest((label, operands)))
    return {scope: digest(sorted(parts)) for scope, parts in sorted(found.items())}


def _changed_rows(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[int, int, str]]:
    changed = {}
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, [0, ""]), new.get(key, [0, ""])
        if before[0] != after[0]:
            changed[key] = (before[0], after[0], after[1] or before[1])
    return changed


def _changed_parts(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    """Scopes in which something else is done; a scope that only has another name is
    the same."""
    gone = collections.Counter(old.values()) - collections.Counter(new.values())
    added = collections.Counter(new.values()) - collections.Counter(old.values())
    names = [k for k, v in new.items() if v in added]
    names += [k for k, v in old.items() if v in gone and k not in names]
    return tuple(sorted(name for name in set(names) if name))
