"""Which configuration a kernel runs with: an explicit, a measured or a predicted one.

Nothing runs here: a prediction is arithmetic over a few hundred candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hlo_tools.errors import KernelConfigError, UnsupportedError
from hlo_tools.targets import Target
from pallas_kernels.kernel import KernelConfig, KernelFamily, Prediction
from pallas_kernels.measured import PACKAGED, MeasuredTable, find_table, table_path


@dataclass(frozen=True)
class Selection:
    """A configuration and where it is from.

    Attributes:
      config: the choice.
      source: "explicit", "measured" or "predicted".
      prediction: its predicted time, whatever the source.
      why: one sentence.
    """

    config: KernelConfig
    source: str
    prediction: Prediction
    why: str


@dataclass(frozen=True)
class Explanation:
    """How a selection came about.

    Attributes:
      family: name of the kernel family.
      problem: what is computed.
      target: on what.
      selection: the choice.
      ranking: the legal configurations and their predictions, fastest first.
      refused: the others, and why they can not run.
    """

    family: str
    problem: Any
    target: Target
    selection: Selection
    ranking: tuple[tuple[KernelConfig, Prediction], ...]
    refused: Mapping[KernelConfig, str]


@dataclass(frozen=True)
class ConfigSelector:
    """Chooses the configurations of one kernel family on one device.

    Attributes:
      family: the kernel.
      target: the device.
      tables: folder of the measured tables.
    """

    family: KernelFamily
    target: Target
    tables: Path = field(default=PACKAGED)

    @cached_property
    def table(self) -> MeasuredTable | None:
        """The measured table of this kind of device, or None.

        Raises:
          MeasuredTableError: its file can not be read; names it.
        """
        return find_table(self.family, self.target.device_kind, self.tables)

    def select(
        self, problem: Any, explicit: KernelConfig | Mapping[str, Any] | None = None
    ) -> Selection:
        """Returns the explicit configuration, the measured best, or the predicted best.

        Args:
          problem: what is computed.
          explicit: the caller's own choice.

        Raises:
          KernelConfigError: the explicit one can not run; says why.
          UnsupportedError: no configuration can run; says why.
          MeasuredTableError: the device's table can not be read.
        """
        if explicit is not None:
            return self._explicit(problem, explicit)
        measured = self.table and self.table.config(self.family, problem)
        note = "nothing measured for it on this kind of device"
        if measured:
            reason = self.family.refuse(problem, measured, self.target)
            if reason is None:
                path = table_path(
                    self.family.name, self.target.device_kind, self.tables
                )
                where = f"{path.parent.name}/{path.name}"
                why = f"the fastest of those measured ({where})"
                return self._selection(problem, measured, "measured", why)
            note = f"the measured {measured} can not run: {reason}"
        ranking, _ = self._rank(problem)
        config, prediction = ranking[0]
        why = f"the fastest predicted of {len(ranking)} that can run; {note}"
        return Selection(config, "predicted", prediction, why)

    def explain(
        self, problem: Any, explicit: KernelConfig | Mapping[str, Any] | None = None
    ) -> Explanation:
        """Returns how `select` chooses; explanation.py shows it.

        Args and raises: as `select`.
        """
        selection = self.select(problem, explicit)
        ranking, refused = self._rank(problem)
        return Explanation(
            self.family.name, problem, self.target, selection, tuple(ranking), refused
        )

    def _explicit(
        self, problem: Any, explicit: KernelConfig | Mapping[str, Any]
    ) -> Selection:
        wanted = self.family.config_class
        if isinstance(explicit, Mapping):
            explicit = wanted.from_dict(explicit)
        if not isinstance(explicit, wanted):
            raise KernelConfigError(
                f"{self.family.name} takes a {wanted.__name__}, got {explicit!r}"
            )
        reason = self.family.refuse(problem, explicit, self.target)
        if reason is not None:
            raise KernelConfigError(f"{self.family.name}: {explicit}: {reason}")
        return self._selection(problem, explicit, "explicit", "given by the caller")

    def _selection(
        self, problem: Any, config: KernelConfig, source: str, why: str
    ) -> Selection:
        prediction = self.family.predict(problem, config, self.target)
        return Selection(config, source, prediction, why)

    def _rank(
        self, problem: Any
    ) -> tuple[list[tuple[KernelConfig, Prediction]], dict[KernelConfig, str]]:
        """The legal configurations, fastest first, and the others' reasons."""
        refused: dict[KernelConfig, str] = {}
        legal = self.family.candidates(problem, self.target, refused)
        if not legal:
            reasons = Counter(refused.values()).most_common(3)
            told = "; ".join(reason for reason, _ in reasons) or "it has none"
            raise UnsupportedError(
                f"no configuration of {self.family.name} can run this on"
                f" {self.target.spec.name}: {told}"
            )
        predicted = [
            (config, self.family.predict(problem, config, self.target))
            for config in legal
        ]
        # sorted is stable: between equals, the order of the family's space decides
        return sorted(predicted, key=lambda pair: pair[1].seconds), refused


def selector(family: str, device: str, tables: Path = PACKAGED) -> ConfigSelector:
    """Returns the selector of a family and a device by their names.

    Args:
      family: a row of `pallas_kernels.families.FAMILIES`.
      device: as `Target.parse` takes it.
      tables: folder of the measured tables.

    Raises:
      UnknownNameError: unknown family or device.
    """
    from pallas_kernels.families import load_family

    return ConfigSelector(load_family(family), Target.parse(device), tables)
