"""What each subcommand of `hlo-tools` does, once its arguments are understood."""

import dataclasses
import importlib
import importlib.metadata
import json
import platform
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from hlo_tools.cli_output import (
    progress,
    read_text,
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
    from hlo_tools import runner
    from hlo_tools.pipeline import PassPipeline
    from hlo_tools.stage import StageConfig

    PassPipeline.parse(passes)  # the same
    config = StageConfig(passes=passes, exactness=exactness, verify=verify)
    start = runner.run_module if program.is_module else runner.run_script
    return start(program.name, list(program.arguments), config, report=report)


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
        return _explain_program(program, passes, target, form)
    if program.arguments:
        raise HloToolsError(
            f"{program.name} is read as MLIR text, which takes no arguments: "
            f"got {' '.join(program.arguments)}"
        )
    _, report = _rewrite(program.name, passes, target or "cpu")
    sys.stdout.write(render(report, form, color=wants_color()))
    return int(bool(report.findings()))


def passes(form: str) -> int:
    """`hlo-tools passes`."""
    table = describe_passes()
    if form == "json":
        print(json.dumps(table, indent=2))
        return 0
    width = max(len(row["name"]) for row in table["passes"])
    for row in table["passes"]:
        print(f"{row['name']:<{width}}  {row['exactness']}")
        print(textwrap.fill(row["summary"], 80, **_INDENT))
        if row["options"]:
            options = [f"{o['name']}={o['default']}" for o in row["options"]]
            print(textwrap.fill(f"options: {{{','.join(options)}}}", 80, **_INDENT))
    print()
    for name, spec in table["groups"].items():
        print(textwrap.fill(f"{name} = {spec}", 80, subsequent_indent="    "))
    return 0


_INDENT = {"initial_indent": "    ", "subsequent_indent": "    "}


def describe_passes() -> dict[str, Any]:
    """The passes and named groups of passes, as JSON-ready values."""
    from hlo_tools.passes import PASSES
    from hlo_tools.pipeline import ALIASES

    return {
        "passes": [_describe_pass(name, place) for name, place in PASSES.items()],
        "groups": {name: str(spec) for name, spec in ALIASES.items()},
    }


def _describe_pass(name: str, place: str) -> dict[str, Any]:
    module, _, attribute = place.partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    options = [
        {
            "name": field.name.replace("_", "-"),
            "default": None if field.default is dataclasses.MISSING else field.default,
        }
        for field in dataclasses.fields(cls)
    ]
    return {
        "name": name,
        "exactness": cls.exactness,
        "summary": cls.summary,
        "options": options,
    }


def _rewrite(file: str, passes: str, target: str) -> tuple[Any, RewriteReport]:
    """Run passes on the MLIR text in `file`."""
    from hlo_tools.pipeline import PassPipeline
    from hlo_tools.targets import Target

    PassPipeline.parse(passes)  # a misspelled name before a long file is read
    device = Target.parse(target)
    text, name = read_text(file)
    from hlo_tools import driver
    from hlo_tools.module import StableHloModule

    with progress(f"running passes on {name}"):
        module = StableHloModule.parse(text, filename=name)
        return driver.run_passes(module, passes, device)


def _write_report(report: RewriteReport, destination: str) -> None:
    color = destination == "-" and wants_color()
    write_text(destination, render(report, report_format(destination), color))
