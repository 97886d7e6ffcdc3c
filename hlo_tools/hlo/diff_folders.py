"""Two dump folders: each module with its counterpart."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlo_tools.errors import HloToolsError
from hlo_tools.hlo.diff import diff
from hlo_tools.hlo.diff_result import SCHEMA, DiffResult
from hlo_tools.hlo.reading import parse_folder


@dataclass(frozen=True)
class FolderDiff:
    """What differs between two dump folders.

    Attributes:
        results: for each (function, stage) that both have, what differs.
        only_a, only_b: (function, stage) of the modules that one of them has.
    """

    results: dict[tuple[str, str], DiffResult]
    only_a: tuple[tuple[str, str], ...]
    only_b: tuple[tuple[str, str], ...]

    @property
    def is_same(self) -> bool:
        same = all(result.is_same for result in self.results.values())
        return same and not self.only_a and not self.only_b

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "schema": SCHEMA,
            "same": self.is_same,
            "modules": [
                {"function": name, "stage": stage, **result.as_dict()}
                for (name, stage), result in self.results.items()
            ],
            "only_a": [list(key) for key in self.only_a],
            "only_b": [list(key) for key in self.only_b],
        }

    def text(self) -> str:
        """The differences for a reader; modules that are the same take one line."""
        lines = []
        for (name, stage), result in self.results.items():
            if result.is_same:
                lines.append(f"{name} {stage}: same program\n")
            else:
                lines.append(f"{name} {stage}:\n{result.text()}\n")
        for side, keys in (("a", self.only_a), ("b", self.only_b)):
            lines += [f"{name} {stage}: only in {side}\n" for name, stage in keys]
        return "".join(lines)


def diff_folders(
    a: str | Path,
    b: str | Path,
    ignore: Collection[str] = (),
    tell: Callable[[str], None] = lambda words: None,
) -> FolderDiff:
    """Compares two folders that `--xla_dump_to` filled.

    Args:
        a, b: the folders.
        ignore: as for `diff`.
        tell: called with a few words on what is being compared.

    Raises:
        HloToolsError: one of them has no modules in it.
    """
    first, second = parse_folder(a), parse_folder(b)
    results = {}
    for key in first:
        if key in second:
            tell(" ".join(key))
            results[key] = diff(first[key], second[key], ignore)
    if not results and {k[1] for k in first}.isdisjoint(k[1] for k in second):
        raise HloToolsError(f"{a} and {b} have no stage in common")
    return FolderDiff(
        results,
        tuple(key for key in first if key not in second),
        tuple(key for key in second if key not in first),
    )
