"""What each subcommand of `hlo-tools` does, once its arguments are understood."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hlo_tools.cli_output import (
    progress,
    read_module,
    render,
    report_format,
    say,
    stdout_to_stderr,
    wants_color,
    write_text,
)
from hlo_tools.cli_parsing import is_script
from hlo_tools.errors import HloToolsError
from hlo_tools.report import RewriteReport

EXACTNESS = ("bitwise", "reassociating", "approximate")


@dataclasses.dataclass(frozen=True)
class Program:
    """What to run or read.

    Args:
        name: a file, "-" for stdin, or a module's name.
        arguments: what the program finds in `sys.argv` after its own name.
        is_module: whether `name` is a module's name.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @classmethod
    def of(
        cls, file: str | None, arguments: Sequence[str] | None, module: str | None
    ) -> "Program":
        """From the positional arguments and `-m`.

        Raises:
            HloToolsError: neither a file nor a module is given.
        """
        rest = tuple(arguments or ())
        if module is not None:  # then the first argument is not a file
            return cls(module, (() if file is None else (file,)) + rest, True)
        if file is None:
            raise HloToolsError("nothing to run: give a file, or -m and a module")
        return cls(file, rest)

    @property
    def runs(self) -> bool:
        """Whether this is a Python program rather than MLIR text."""
        return self.is_module or is_script(self.name)


def version_line() -> str:
    """Versions of this package and of what it runs on."""
    names = ("hlo-tools", "jax", "jaxlib")
    found = [f"{name} {_version(name)}" for name in names]
    return ", ".join([*found, f"Python {platform.python_version()}"])


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def run(
    program: Program, passes: str, exactness: str, verify: bool, report: str | None
) -> int:
    """`hlo-tools run`: the program's own exit status."""
    if report is not None:
        report_format(report)  # before the program runs, not after
    from hlo_tools.driver import StageConfig
    from hlo_tools.pipeline import PassPipeline

    PassPipeline.parse(passes)  # the same
    return start(program, StageConfig(passes, exactness, verify), report)


def start(program: Program, config: Any, report: str | None, **options: Any) -> int:
    """Run a program under the stage; its exit status.

    Args:
        program: what to run.
        config: a `StageConfig`.
        report: where the report goes, if anywhere.
        options: as for `runner.run_script`.
    """
    from hlo_tools import runner

    run = runner.run_module if program.is_module else runner.run_script
    return run(program.name, list(program.arguments), config, report=report, **options)


def opt(
    file: str, passes: str, target: str, output: str, report_file: str | None
) -> int:
    """`hlo-tools opt`: 1 when a site failed its check."""
    if report_file is not None:
        report_format(report_file)
    if report_file == "-" and output == "-":
        raise HloToolsError(
            "both the module and the report would go to stdout: give -o FILE, or "
            "--report FILE"
        )
    module, report = _rewrite(file, passes, target)
    write_text(output, module.as_text())
    if report_file is not None:
        _write_report(report, report_file)
    say(report.summary())
    return int(bool(report.with_status("failed")))


def explain(program: Program, passes: str, target: str | None, form: str) -> int:
    """`hlo-tools explain`: 1 when there are near misses or failed sites."""
    if program.runs:
        status, report = _explain_program(program, passes, target)
    elif program.arguments:
        raise HloToolsError(
            f"{program.name} is read as MLIR, which takes no arguments: "
            f"got {' '.join(program.arguments)}"
        )
    else:
        status, report = 0, _rewrite(program.name, passes, target or "cpu")[1]
    sys.stdout.write(render(report, form, color=wants_color()))
    if status:
        say(f"error: {program.name} ended with status {status}, so more may be missing")
        return 2
    return int(bool(report.findings()))


def _explain_program(
    program: Program, passes: str, target: str | None
) -> tuple[int, RewriteReport]:
    """Run the program, with what it prints on stderr; its status and the report."""
    from hlo_tools.driver import StageConfig
    from hlo_tools.pipeline import PassPipeline
    from hlo_tools.stage import is_off

    PassPipeline.parse(passes)
    if not program.is_module and not Path(program.name).is_file():
        raise HloToolsError(f"{program.name}: no such file")
    if target is not None:
        return _explain_for(program, passes, target)
    if is_off():
        raise HloToolsError(
            "HLO_TOOLS switches the stage off: unset it, or name a --target"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        with stdout_to_stderr():
            status = start(program, StageConfig(passes), str(file))
        if not file.exists():
            return status or 1, RewriteReport(program.name)
        return status, RewriteReport.from_json(file.read_text())


def _explain_for(
    program: Program, passes: str, target: str
) -> tuple[int, RewriteReport]:
    """The same for a target that need not be here.

    The program runs as it is written, and JAX writes down each module it compiles.
    """
    import jax

    from hlo_tools import driver
    from hlo_tools.module import StableHloModule
    from hlo_tools.report_merge import merge
    from hlo_tools.targets import Target

    device = Target.parse(target)
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_dump_ir_to", folder)
        jax.config.update("jax_dump_ir_modes", "stablehlo")
        try:
            with stdout_to_stderr():
                status = start(program, driver.StageConfig(passes=""), None)
        finally:
            jax.config.update("jax_dump_ir_to", "")
        files = sorted(Path(folder).glob("*_compile.mlir"))
        with progress(f"running passes on {len(files)} modules"):
            modules = [StableHloModule.parse(f.read_text(), f.name) for f in files]
            reports = [driver.run_passes(m, passes, device)[1] for m in modules]
    return status, merge(reports, Path(program.name).name)


def passes(form: str) -> int:
    """`hlo-tools passes`."""
    table = describe_passes()
    if form == "json":
        print(json.dumps(table, indent=2))
        return 0
    width = max(len(row["name"]) for row in table["passes"])
    for row in table["passes"]:
        print(f"{row['name']:<{width}}  {row['exactness']}")
        print(_wrap(row["summary"], "    ", "    "))
        for option in row["options"]:
            print(f"    {{{option['name']}={option['default']}}}")
    print()
    for name, spec in table["groups"].items():
        print(_wrap(f"{name} = {spec.replace(',', ', ')}", "", "    "))
    return 0


def _wrap(text: str, first: str, rest: str) -> str:
    return textwrap.fill(
        text, 80, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def describe_passes() -> dict[str, Any]:
    """The passes and named groups of passes, as JSON-ready values."""
    from hlo_tools.passes import ALIASES, PASSES

    return {
        "passes": [_describe_pass(name) for name in PASSES],
        "groups": dict(ALIASES),
    }


def _describe_pass(name: str) -> dict[str, Any]:
    from hlo_tools.pipeline import load_pass

    cls = load_pass(name)
    fields = dataclasses.fields(cls)
    options = [
        {"name": f.name.replace("_", "-"), "default": _spelled(f.default)}
        for f in fields
    ]
    return {
        "name": name,
        "exactness": cls.exactness,
        "summary": cls.summary,
        "options": options,
    }


def _spelled(value: Any) -> str:
    """An option's value as a pipeline spec spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rewrite(file: str, passes: str, target: str) -> tuple[Any, RewriteReport]:
    """Run passes on the MLIR in `file`."""
    stay_off_devices()
    from hlo_tools import driver
    from hlo_tools.module import StableHloModule
    from hlo_tools.pipeline import PassPipeline
    from hlo_tools.targets import Target

    PassPipeline.parse(passes)  # a misspelled name before a long file is read
    device = Target.parse(target)
    text, name = read_module(file)

    with progress(f"running passes on {name}"):
        module = StableHloModule.parse(text, filename=name)
        return driver.run_passes(module, passes, device)


def stay_off_devices() -> None:
    """Keep JAX from starting a GPU or TPU, which rewriting text has no use for."""
    if "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _write_report(report: RewriteReport, destination: str) -> None:
    color = destination == "-" and wants_color()
    write_text(destination, render(report, report_format(destination), color))
