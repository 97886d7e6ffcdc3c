"""A program under bisection: its modules, and runs of it under other settings."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hlo_tools.bisect import Outcome
from hlo_tools.bisect_module import run_command
from hlo_tools.stage import StagedModule


class Capture:
    """Keeps the modules that the stage changed, or failed at, while a program runs.

    One that a pass of the user's own changed is kept too, even if the stage dropped
    the change because nothing was bound.
    """

    def __init__(self) -> None:
        self._modules: dict[str, StagedModule] = {}
        self._unbound = 0

    def __call__(self, module: StagedModule) -> None:
        """Takes a module; see `install(modules=...)`."""
        report = module.report
        failed = any(note.startswith("the stage failed") for note in report.notes)
        own = any(":" in one.name and one.changed for one in report.passes)
        if module.rewritten or failed or own or report.with_status("failed"):
            self._modules.setdefault(module.original, module)
        else:
            self._unbound += any(one.changed for one in report.passes)

    def why_none(self) -> str:
        """Why there are no modules, as a sentence."""
        if not self._unbound:
            return "no module was changed by the passes: there is nothing to bisect"
        return (
            "nothing was bound, and a program in which nothing is bound reaches XLA as "
            "it is written: there is nothing to bisect"
        )

    @property
    def modules(self) -> list[StagedModule]:
        """The modules, each once, in the order of their first compile."""
        return list(self._modules.values())


@dataclass
class ProgramSubject:
    """A program that is run anew, by a shell command, for every check.

    Attributes:
      command: {} in it stands for the program, run under the stage.
      program: the command line that runs it so.
      modules: what the stage changed in it.
    """

    command: str
    program: Sequence[str]
    modules: Sequence[StagedModule]

    def outcome(self, spec: str) -> Outcome:
        """Runs the command under a pipeline; "" switches the stage off."""
        environment = {**os.environ, "HLO_TOOLS_PASSES": spec}
        if not spec:
            environment["HLO_TOOLS"] = "off"
        line = self.command.replace("{}", shlex.join(self.program))
        return run_command(line, environment)

    def sites(self, spec: str) -> list[str]:
        """The sites of all modules, led by their module's name."""
        found = [
            f"{module.report.module}/{site.id}"
            for module in self.modules
            for site in module.report.with_status("bound", "inlined", "outlined")
            if site.status == "bound" or "bind-kernels" not in spec
        ]
        return list(dict.fromkeys(found))

    def module_of(self, site: str) -> StagedModule:
        """The module that a site is in."""
        name = site.rpartition("/")[0]
        return next(m for m in self.modules if m.report.module == name)


def program_command(
    name: str, arguments: Sequence[str], is_module: bool, exactness: str
) -> list[str]:
    """The command line that runs a program under the stage."""
    start = [sys.executable, "-m", "hlo_tools", "run", "--exactness", exactness]
    return [*start, *(["-m"] if is_module else []), name, *arguments]
