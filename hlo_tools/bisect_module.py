"""A module under bisection: its candidates, and the checks they are put to."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hlo_tools import driver, verify
from hlo_tools.bisect import Outcome
from hlo_tools.errors import HloToolsError, describe_error
from hlo_tools.module import StableHloModule
from hlo_tools.pipeline import PassPipeline
from hlo_tools.report import RewriteReport
from hlo_tools.targets import Target
from hlo_tools.verify_program import (
    Reference,
    argument_types,
    program_tolerance,
    random_arguments,
)

# (text as it was written, text of a candidate) -> outcome
Check = Callable[[str, str], Outcome]

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NO_COMMAND = (126, 127)  # the shell's: not executable, not found


class CheckError(HloToolsError):
    """A check that can not tell good from bad; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """A module after some passes.

    Attributes:
      text: MLIR; None if a pass failed.
      report: what the passes say.
      error: the failure, with its type.
    """

    text: str | None
    report: RewriteReport
    error: str = ""


@dataclass
class ModuleSubject:
    """A module, and what passes make of it.

    Attributes:
      text: MLIR text with source locations.
      target: what it is compiled for.
      check: tells good from bad.
      exactness: the loosest rewrite that is made.
      skip_sites, only_sites: as in `StageConfig`.
    """

    text: str
    target: Target
    check: Check
    exactness: str = "reassociating"
    skip_sites: tuple[str, ...] = ()
    only_sites: tuple[str, ...] = ()
    _candidates: dict[str, Candidate] = field(default_factory=dict, repr=False)
    _outcomes: dict[str, Outcome] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The module's name."""
        return StableHloModule.parse(self.text).name

    def candidate(self, spec: str) -> Candidate:
        """The module after the passes of a spec, made once."""
        if spec not in self._candidates:
            self._candidates[spec] = self._make(spec)
        return self._candidates[spec]

    def _make(self, spec: str) -> Candidate:
        module = StableHloModule.parse(self.text)
        if not spec:
            return Candidate(self.text, driver.new_report(module.name, self.target))
        try:
            module, report = driver.run_passes(
                module,
                spec,
                self.target,
                self.exactness,
                skip_sites=self.skip_sites,
                only_sites=self.only_sites,
                strict=True,
            )
            module.verify()
        except Exception as error:  # a pass, a kernel's own code, MLIR's verifier
            report = driver.new_report(module.name, self.target)
            return Candidate(None, report, describe_error(error))
        return Candidate(module.as_text(debug_info=True), report)

    def outcome(self, spec: str) -> Outcome:
        """What the check says; a module is not checked twice."""
        candidate = self.candidate(spec)
        if candidate.text is None:
            return Outcome(False, candidate.error)
        key = StableHloModule.parse(candidate.text).as_text()  # without locations
        if key in self._outcomes:
            known = self._outcomes[key]
            return Outcome(known.good, known.detail, True)
        self._outcomes[key] = found = self.check(self.text, candidate.text)
        return found

    def sites(self, spec: str) -> list[str]:
        """The sites that the last pass of a spec treats, or may have failed at."""
        candidate = self.candidate(spec)
        if candidate.text is None:
            # Whatever was found; those that the pass never reached do no harm.
            found = PassPipeline.parse(spec).passes
            names = [one.name for one in found]
            if "bind-kernels" in names:
                found = found[: names.index("bind-kernels")]
                candidate = self.candidate(str(PassPipeline(found)))
            return [s.id for s in candidate.report.sites if s.status != "near-miss"]
        bound = "bind-kernels" in [one.name for one in candidate.report.passes]
        wanted = ("bound",) if bound else ("outlined", "inlined")
        return [site.id for site in candidate.report.with_status(*wanted)]


class NumericCheck:
    """Runs a candidate and the original on the same random inputs.

    Args:
      target: programs run on its platform if that is here, else on CPU.
      tolerance: as a part of the largest magnitude of each result; by the narrowest
        floating-point type of the program unless given.
      seed: of the inputs.
    """

    def __init__(self, target: Target, tolerance: float | None = None, seed: int = 0):
        self.target, self.tolerance, self.seed = target, tolerance, seed
        here = verify.can_run(target.platform)
        self.platform = target.platform if here else "cpu"
        self._references: dict[str, Reference] = {}

    def reference(self, text: str) -> Reference:
        """The original's inputs and results, computed once.

        Raises:
          CheckError: it can not run here, or gives nothing to compare.
        """
        if text not in self._references:
            try:
                self._references[text] = self._run(text)
            except CheckError:
                raise
            except Exception as error:
                raise CheckError(
                    f"the module as it is written does not run on {self.platform}: "
                    f"{describe_error(error)}"
                ) from error
        return self._references[text]

    def _run(self, text: str) -> Reference:
        types = argument_types(text)
        for small in (False, True):
            inputs = random_arguments(types, self.seed, small)
            found = Reference.of(text, inputs, self.platform)
            if all(np.isfinite(x.astype(np.float64)).all() for x in found.results):
                return found
        if not any(np.isfinite(x.astype(np.float64)).any() for x in found.results):
            raise CheckError(
                "on random inputs the module as it is written has no finite result, "
                "so that there is nothing to compare"
            )
        return found

    def __call__(self, original: str, candidate: str) -> Outcome:
        reference = self.reference(original)
        try:
            got = verify.run_text(candidate, reference.inputs, self.platform)
        except Exception as error:
            if self.platform != self.target.platform:
                raise CheckError(
                    f"a program for {self.target.spec.name} does not run on "
                    f"{self.platform}, and there is no {self.target.platform} here: "
                    f"{describe_error(error)}"
                ) from error
            return Outcome(False, f"does not run: {describe_error(error)}")
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = program_tolerance(original, self.platform)
            found = reference.judge(got, tolerance)
        else:
            found = verify.compare_all(got, reference.results, tolerance)
        where = f" ({found.detail})" * bool(found.detail)
        return Outcome(
            found.passed,
            f"differs by {found.max_error:.3g}, allowed {found.tolerance:.3g}{where}",
        )


def command_check(command: str) -> Check:
    """A shell command that is given a candidate's file in the place of {}."""

    def check(original: str, candidate: str) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "candidate.mlir")
            file.write_text(candidate, encoding="utf-8")
            return run_command(command.replace("{}", shlex.quote(str(file))))

    if "{}" not in command:
        raise CheckError(
            f"--check {command!r}: expected {{}} where the module's file goes, as in "
            "--check 'python compare.py {}', or module:function"
        )
    return check


def run_command(command: str, environment: dict[str, str] | None = None) -> Outcome:
    """Runs a shell command; exit status 0 is good.

    Raises:
      CheckError: there is no such command.
    """
    done = subprocess.run(
        command,
        shell=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode in _NO_COMMAND:
        raise CheckError(f"the check can not be run: {done.stderr.strip()}")
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    last = f": {lines[-1].strip()}" if lines else ""
    detail = f"the check ended with status {done.returncode}{last}"
    return Outcome(done.returncode == 0, detail)


def function_check(place: str) -> Check:
    """A Python function (original text, candidate text) -> whether it is good.

    Raises:
      CheckError: it can not be imported.
    """
    module, _, name = place.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        raise CheckError(
            f"--check {place}: can not import it: {describe_error(error)}"
        ) from error

    def check(original: str, candidate: str) -> Outcome:
        try:
            good = bool(function(original, candidate))
        except Exception as error:
            return Outcome(False, f"{place}: {describe_error(error)}")
        return Outcome(good, f"{place} finds it bad" * (not good))

    return check


def is_function(text: str) -> bool:
    """Whether a --check names a Python function rather than a command."""
    return _FUNCTION.fullmatch(text) is not None
