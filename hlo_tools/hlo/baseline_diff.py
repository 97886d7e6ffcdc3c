"""What differs between a program and its baseline."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hlo_tools.hlo.baseline import BaselineError
from hlo_tools.hlo.diff_text import count

_WHOLE = {
    "graph": "the graph: what is computed from what",
    "results": "the results or their order",
    "fusions": "how operations are grouped in fusions",
    "layouts": "layouts in memory",
    "schedule": "the order that instructions run in",
    "aliasing": "which results take the buffers of which parameters",
}
_SHOWN = 30


_Parts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class BaselineDiff:
    """What differs from a baseline.

    Attributes:
        reasons: in words, what is not the same.
        operations: operation to (count before, count now, in which parts).
        collectives: collective to (count before, count now).
        where: parts of the program, by their op_names, that are not the same.
    """

    reasons: tuple[str, ...] = ()
    operations: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    collectives: Mapping[str, tuple[int, int]] = field(default_factory=dict)
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
                for key, (old, new, where) in self.operations.items()
            ],
            "collectives": [
                {"collective": key, "before": old, "now": new}
                for key, (old, new) in self.collectives.items()
            ],
            "where": list(self.where),
        }

    def text(self) -> str:
        """The differences for a reader."""
        if self.is_same:
            return "same program as the baseline\n"
        lines = ["differs from the baseline:"]
        lines += [f"  {reason}" for reason in self.reasons]
        if self.collectives:
            lines.append("collectives:")
            for key, (old, new) in self.collectives.items():
                lines.append(f"  {key}: {old} -> {new}")
        if self.operations:
            lines.append("operations:")
        for key, (old, new, where) in list(self.operations.items())[:_SHOWN]:
            sign = "+" if new > old else "-"
            at = f"  ({where})" if where else ""
            lines.append(f"  {sign}{abs(new - old)} {key}{at}")
        if len(self.operations) > _SHOWN:
            lines.append(f"  ... and {len(self.operations) - _SHOWN} more")
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
    where = ()
    if "graph" in changed:
        where = _changed_parts(baseline["parts"], now["parts"])
    operations = _changed_operations(baseline["parts"], now["parts"], where)
    if "graph" in changed and not operations:
        reasons.append("the same operations, but with other operands or attributes")
    old, new = baseline["collectives"], now["collectives"]
    collectives = {
        key: (old.get(key, 0), new.get(key, 0))
        for key in sorted(old.keys() | new.keys())
        if old.get(key, 0) != new.get(key, 0)
    }
    return BaselineDiff(tuple(reasons), operations, collectives, where)


def _changed_parts(old: _Parts, new: _Parts) -> tuple[str, ...]:
    """Scopes in which something else is done; one that only has another name is the
    same."""
    if not any(new) or not any(old):  # no op_names
        return ()
    before = {k: v["hash"] for k, v in old.items() if new.get(k) != v}
    after = {k: v["hash"] for k, v in new.items() if old.get(k) != v}
    renamed = collections.Counter(before.values()) & collections.Counter(after.values())
    names = [k for side in (after, before) for k, v in side.items() if v not in renamed]
    return tuple(sorted({name for name in names if name}))


def _totals(parts: _Parts) -> collections.Counter[str]:
    totals: collections.Counter[str] = collections.Counter()
    for part in parts.values():
        totals.update(part["operations"])
    return totals


def _changed_operations(
    old: _Parts, new: _Parts, where: Collection[str]
) -> dict[str, tuple[int, int, str]]:
    """Operations of which there are more or fewer, with the parts where that is so."""
    before, after = _totals(old), _totals(new)
    changed = {}
    for key in sorted(before.keys() | after.keys()):
        if before[key] == after[key]:
            continue
        scopes = [
            scope
            for scope in where
            if old.get(scope, {}).get("operations", {}).get(key, 0)
            != new.get(scope, {}).get("operations", {}).get(key, 0)
        ]
        more = ", ..." if len(scopes) > 2 else ""
        changed[key] = (before[key], after[key], ", ".join(scopes[:2]) + more)
    return changed
