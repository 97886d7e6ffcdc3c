"""`read_dump`: the compiles that a dump folder holds, each with all of its files.

Reads folders that `hlo-tools dump` wrote and those of `--xla_dump_to`, one folder for
all processes or one folder each. XLA may give one function two module numbers, one
before and one after optimization: they are paired here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hlo_tools.errors import HloToolsError

_FILE = re.compile(r"(?:(?P<time>\d{6,})\.)?module_(?P<number>\d+)\.(?P<rest>.+)")
_FORMAT = r"(?:txt|hlo|hlo\.pb|hlo\.pb\.gz|pbtxt)"
# What a file's name ends in -> what it is; the first that fits counts.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(rf"(?P<name>.+?)\.{pattern}"))
    for kind, pattern in (
        ("stablehlo_before_stage", r"stablehlo_before_stage\.mlir"),
        ("stablehlo_after_stage", r"stablehlo_after_stage\.mlir"),
        ("report", r"report\.json"),
        ("cost", r"cost\.json"),
        ("before_optimizations", rf"before_optimizations\.{_FORMAT}"),
        (
            "buffer_assignment",
            r"(?:[\w.]+?[._])?after_optimizations-buffer-assignment\.txt",
        ),
        (
            "after_optimizations",
            rf"(?:cl_\d+\.|[\w]+(?:\.\d+)?_\w+_|\w+_)?after_optimizations\.{_FORMAT}",
        ),
        (
            "pass",
            rf"\d{{4}}\..+\.after_.+\.{_FORMAT}",
        ),
    )
)


@dataclass(frozen=True)
class DumpEntry:
    """One compile.

    Attributes:
        name: of the module, such as "jit_train_step".
        number: of the compile in its folder; XLA's own, before optimization.
        folder: that the files are in. With several processes, there is one each.
        files: kind -> file; kinds are "stablehlo_before_stage",
            "stablehlo_after_stage", "before_optimizations", "after_optimizations",
            "buffer_assignment", "report" and "cost", those that are there.
        passes: the module after XLA passes, in the order they ran.
        other: files of other kinds.
    """

    name: str
    number: int
    folder: Path
    files: dict[str, Path] = field(default_factory=dict)
    passes: tuple[Path, ...] = ()
    other: tuple[Path, ...] = ()


def read_dump(folder: str | Path) -> list[DumpEntry]:
    """Reads what is in a dump folder and in the folders inside it.

    Returns:
        The compiles, by folder and number.

    Raises:
        HloToolsError: there is no such folder, or no dump in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise HloToolsError(f"{folder}: no such folder")
    groups: dict[tuple[Path, str, int], DumpEntry] = {}
    for path in sorted(root.rglob("*module_*")):
        found = _FILE.fullmatch(path.name)
        if found is None or not path.is_file():
            continue
        number, place = int(found["number"]), path.parent
        kind, name = classify(found["rest"])
        if above := _FILE.fullmatch(place.name):  # a folder of one compile's files
            number, place = int(above["number"]), place.parent
            name = classify(above["rest"])[1]
            kind = kind if kind == "pass" else ""
        # A time stamp is a compile's own: processes that share a folder differ in it.
        key = (place, found["time"] or "", number)
        entry = groups.get(key)
        if entry is None:
            entry = DumpEntry(name, number, place)
        elif kind and not entry.files:  # its name is sure now
            entry = replace(entry, name=name)
        groups[key] = _with_file(entry, kind, path)
    if not groups:
        raise HloToolsError(
            f"{folder}: no dump in this folder; expected files such as "
            "module_0001.jit_f.before_optimizations.txt"
        )
    return _paired(groups.values())


def classify(rest: str) -> tuple[str, str]:
    """(kind, module name) of what follows module_0001. in a file's name; the kind is ""
    for other files."""
    for kind, pattern in _KINDS:
        if found := pattern.fullmatch(rest):
            return kind, found["name"]
    return "", rest.partition(".cl_")[0]


def _with_file(entry: DumpEntry, kind: str, path: Path) -> DumpEntry:
    files, passes, other = entry.files, entry.passes, entry.other
    if kind == "pass":
        passes = (*passes, path)
    elif kind and (kind not in files or path.suffix == ".txt"):
        files = {**files, kind: path}
    else:
        other = (*other, path)
    return DumpEntry(entry.name, entry.number, entry.folder, files, passes, other)


def _paired(entries: Iterable[DumpEntry]) -> list[DumpEntry]:
    """Entries with only the module before, joined with the next of that name that has
    only the module after."""
    done: list[DumpEntry] = []
    waiting: dict[tuple[Path, str], list[DumpEntry]] = {}
    order = sorted(entries, key=lambda e: (str(e.folder), e.number))
    for entry in order:
        has_before = "before_optimizations" in entry.files
        has_after = "after_optimizations" in entry.files
        queue = waiting.setdefault((entry.folder, entry.name), [])
        if has_before and not has_after:
            queue.append(entry)
        elif has_after and not has_before and queue:
            done.append(_joined(queue.pop(0), entry))
        else:
            done.append(entry)
    done += [entry for queue in waiting.values() for entry in queue]
    return sorted(done, key=lambda e: (str(e.folder), e.number))


def _joined(before: DumpEntry, after: DumpEntry) -> DumpEntry:
    return DumpEntry(
        before.name,
        before.number,
        before.folder,
        before.files | after.files,
        before.passes + after.passes,
        before.other + after.other,
    )
