"""Tables of measured times: JSON files, one per kind of device and kernel family.

    {"schema": 1, "family": "attention-forward", "device_kind": "NVIDIA H200",
     "date": "2026-01-31", "versions": {"jax": "0.11.2", ...},
     "entries": {KEY: {"config": {...}, "seconds": 1e-3, "timer": "profiler",
                       "all": [{"config": {...}, "seconds": 1e-3},
                               {"config": {...}, "error": "out of registers"}]}}}

KEY is `KernelFamily.key` of a problem; "config" is the fastest of "all".
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hlo_tools.errors import KernelConfigError, MeasuredTableError
from pallas_kernels.kernel import KernelConfig, KernelFamily

SCHEMA = 1
# The tables that are shipped with the package.
PACKAGED = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Sample:
    """One configuration of one problem, tried.

    Attributes:
      config: its fields.
      seconds: median device time of one call; None if it did not run.
      error: why not; None if it did.
    """

    config: dict[str, Any]
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Entry:
    """All that was measured of one problem.

    Attributes:
      samples: the configurations tried; at least one ran.
      timer: what the seconds are: "profiler" (device time) or "wall".
    """

    samples: tuple[Sample, ...]
    timer: str

    @property
    def best(self) -> Sample:
        """The fastest; the first of equals."""
        ran = [sample for sample in self.samples if sample.seconds is not None]
        return min(ran, key=lambda sample: sample.seconds or 0.0)


@dataclass(frozen=True)
class MeasuredTable:
    """The measurements of one family on one kind of device.

    Attributes:
      family: name of the kernel family.
      device_kind: as `jax.Device.device_kind`.
      date: of the last measurement, ISO.
      versions: distribution -> version it was measured with.
      entries: problem key -> what was measured.
    """

    family: str
    device_kind: str
    date: str
    versions: Mapping[str, str]
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def config(self, family: KernelFamily, problem: Any) -> KernelConfig | None:
        """Returns the fastest configuration measured for a problem, or None.

        Raises:
          KernelConfigError: the stored one has other fields than the family's.
        """
        entry = self.entries.get(family.key(problem))
        if entry is None:
            return None
        return family.config_class.from_dict(entry.best.config)

    def merged(self, newer: MeasuredTable) -> MeasuredTable:
        """Returns this table with the entries of another added or put in place.

        Raises:
          MeasuredTableError: it is of another family or device.
        """
        mine, others = ((table.family, table.device_kind) for table in (self, newer))
        if mine != others:
            raise MeasuredTableError(f"a table of {others} is no part of one of {mine}")
        return replace(newer, entries={**self.entries, **newer.entries})

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._as_json(), indent=1) + "\n"
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        os.chmod(file.name, 0o644)  # temporary files are their owner's alone
        os.replace(file.name, path)

    def _as_json(self) -> dict[str, Any]:
        entries = {}
        for key, entry in sorted(self.entries.items()):
            best = entry.best
            tried = [
                {name: value for name, value in asdict(sample).items() if value}
                for sample in entry.samples
            ]
            entries[key] = {
                "config": best.config,
                "seconds": best.seconds,
                "timer": entry.timer,
                "all": tried,
            }
        head = {name: getattr(self, name) for name in ("family", "device_kind", "date")}
        return {
            "schema": SCHEMA, **head, "versions": dict(self.versions),
            "entries": entries,
        }  # fmt: skip


def table_path(family: str, device_kind: str, root: Path = PACKAGED) -> Path:
    """Returns where the table of a family and a kind of device is, or would be."""
    folder = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return root / folder / f"{family}.json"


def load_table(path: Path) -> MeasuredTable:
    """Reads a table.

    Args:
      path: a file that `MeasuredTable.save` wrote.

    Raises:
      MeasuredTableError: unreadable, of another schema, or malformed; names the file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeasuredTableError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise MeasuredTableError(f"{path}: no JSON: {error}") from error
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema != SCHEMA:
        raise MeasuredTableError(
            f"{path}: schema {schema!r}, this version reads {SCHEMA}: measure it anew"
            " with `hlo-tools tune`"
        )
    try:
        entries = {key: _entry(value) for key, value in values["entries"].items()}
        head = {
            name: values[name] for name in ("family", "device_kind", "date", "versions")
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise MeasuredTableError(f"{path}: malformed: {error!r}") from error
    return MeasuredTable(**head, entries=entries)


def _entry(values: dict[str, Any]) -> Entry:
    samples = tuple(Sample(**sample) for sample in values["all"])
    for sample in samples:
        if sample.seconds is not None and not sample.seconds > 0:
            raise ValueError(f"a time of {sample.seconds} s")
    entry = Entry(samples, values["timer"])
    if entry.best.config != values["config"]:
        raise ValueError(f"the best of 'all' is not {values['config']}")
    return entry


def find_table(
    family: KernelFamily, device_kind: str, root: Path = PACKAGED
) -> MeasuredTable | None:
    """Returns the table of a family and a kind of device, or None without one.

    Raises:
      MeasuredTableError: it can not be read, or is another's; names the file.
    """
    path = table_path(family.name, device_kind, root)
    if not path.exists():
        return None
    table = load_table(path)
    if (table.family, table.device_kind) != (family.name, device_kind):
        raise MeasuredTableError(
            f"{path}: is of {table.family} on {table.device_kind}, expected"
            f" {family.name} on {device_kind}"
        )
    for key, entry in table.entries.items():
        try:
            family.problem_of(key)
            family.config_class.from_dict(entry.best.config)
        except KernelConfigError as error:
            raise MeasuredTableError(f"{path}: {error}") from error
    return table
