"""`hlo-tools bisect`: which pass, and which site, makes a check fail."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hlo_tools import cli_commands as commands
from hlo_tools.cli_options import Arguments, ModuleName, Passes
from hlo_tools.cli_output import FORMATS, progress, read_module, say, stdout_to_stderr
from hlo_tools.cli_parsing import check_choice
from hlo_tools.errors import HloToolsError

DEFAULT_FOLDER = "hlo-tools-bisect"


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be bisected, and how.

    Args:
        program: a module's file, or a Python program.
        check: a shell command or "module:function"; None compares results.
        passes: spec of the pipeline in question.
        target: name of a device; None takes a script's own, and cpu for a module.
        exactness: the loosest rewrite that is made.
        tolerance: of the comparison; None goes by the dtypes.
        output: folder of the reproducers.
    """

    program: commands.Program
    check: str | None
    passes: str
    target: str | None
    exactness: str
    tolerance: float | None
    output: str


def bisect(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="MLIR text (- is stdin), or a script."),
    ] = None,
    args: Arguments = None,
    module: ModuleName = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="CHECK",
            help="What tells good from bad: a shell command, whose exit status 0 is "
            "good, with {} for the module's file (for a script: for the command that "
            "runs it), or module:function, called with the texts of the original and "
            "of the candidate. Without it both run on the same random inputs.",
        ),
    ] = None,
    passes: Passes = "default",
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="NAME", help="Device: cpu, h200, v5e, ..."),
    ] = None,
    exactness: Annotated[
        str,
        typer.Option(metavar="LEVEL", help="bitwise, reassociating or approximate."),
    ] = "reassociating",
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            help="Largest difference, as a part of the largest value of a result.",
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="DIR", help="Where reproducers go."),
    ] = DEFAULT_FOLDER,
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="text or json.")
    ] = "text",
) -> Callable[[], int]:
    """Find the pass, and the site, that makes a program wrong.

    Options go before FILE or after it. A script's own arguments follow it too; put
    -- before those that bisect has an option for: script.py --check CHECK --
    --output runs.

    Exit status 0 when nothing is wrong, 1 when something is to blame, 2 when the
    check can not tell.
    """
    check_choice("format", form, FORMATS[:2])
    check_choice("exactness", exactness, commands.EXACTNESS)
    program = commands.Program.of(file, args, module)
    request = Request(program, check, passes, target, exactness, tolerance, output)
    return partial(run_bisect, request, form)


def run_bisect(request: Request, form: str) -> int:
    """Bisects, and prints what was found; the exit status."""
    if not request.program.runs:
        if request.program.arguments:
            raise HloToolsError(
                f"{request.program.name} is read as MLIR, which takes no arguments: "
                f"got {' '.join(request.program.arguments)}"
            )
        if request.target in (None, "cpu"):
            commands.stay_off_devices()
    sys.path.append(os.getcwd())  # passes and checks of one's own live there
    from hlo_tools import bisect_findings
    from hlo_tools.pipeline import PassPipeline

    pipeline = PassPipeline.parse(request.passes)
    with progress(f"bisecting {request.program.name}") as tell:
        find = _bisect_script if request.program.runs else _bisect_file
        findings = find(request, pipeline, tell)
    if form == "json":
        print(json.dumps(bisect_findings.as_dict(findings), indent=2))
    for finding in findings if form == "text" else ():
        stream = sys.stderr if finding.verdict.broken_check else sys.stdout
        stream.write(finding.text())
    return bisect_findings.exit_status(findings)


def _check_of(request: Request, target: Any) -> Any:
    """What tells a good module from a bad one."""
    from hlo_tools import bisect_module

    if request.check is None:
        return bisect_module.NumericCheck(target, request.tolerance)
    if bisect_module.is_function(request.check):
        return bisect_module.function_check(request.check)
    return bisect_module.command_check(request.check)


def _bisect_file(request: Request, pipeline: Any, tell: Any) -> list[Any]:
    from hlo_tools import bisect_findings
    from hlo_tools.bisect_module import ModuleSubject
    from hlo_tools.module import StableHloModule
    from hlo_tools.targets import Target

    target = Target.parse(request.target or "cpu")
    check = _check_of(request, target)
    data, name = read_module(request.program.name)
    text = StableHloModule.parse(data, filename=name).as_text(debug_info=True)
    subject = ModuleSubject(text, target, check, request.exactness)
    folder = Path(request.output)
    return [bisect_findings.bisect_module(subject, pipeline, folder, tell)]


def _bisect_script(request: Request, pipeline: Any, tell: Any) -> list[Any]:
    """Runs the program once to see its modules, then bisects them or reruns it."""
    from hlo_tools import bisect_findings, bisect_module, bisect_script
    from hlo_tools.driver import StageConfig
    from hlo_tools.stage import is_off
    from hlo_tools.targets import Target

    program = request.program
    if not program.is_module and not Path(program.name).is_file():
        raise HloToolsError(f"{program.name}: no such file")
    if is_off():
        raise HloToolsError("HLO_TOOLS switches the stage off: unset it")
    command = None
    if request.check is not None and not bisect_module.is_function(request.check):
        command = request.check
    capture = bisect_script.Capture()
    tell(f"running {program.name}")
    with stdout_to_stderr():
        config = StageConfig(request.passes, request.exactness)
        status = commands.start(program, config, None, modules=capture)
    if status:
        say(f"{program.name} ended with status {status}")
        if command is None and not capture.modules:
            raise HloToolsError(
                f"{program.name} fails, and no module was changed by the passes before "
                "that: there is nothing to bisect"
            )

    def subject_of(text: str) -> bisect_module.ModuleSubject:
        target = Target.parse(request.target) if request.target else _own_target()
        plain = dataclasses.replace(request, check=None) if command else request
        check = _check_of(plain, target)
        return bisect_module.ModuleSubject(text, target, check, request.exactness)

    folder = Path(request.output)
    if command is not None:
        line = bisect_script.program_command(
            program.name, program.arguments, program.is_module, request.exactness
        )
        subject = bisect_script.ProgramSubject(command, line, capture.modules)
        name = Path(program.name).name
        return [
            bisect_findings.bisect_program(
                name, subject, subject_of, pipeline, folder, tell
            )
        ]
    if not capture.modules:
        say(capture.why_none())
    findings = []
    for number, module in enumerate(capture.modules):
        inside = folder / f"module{number}" if len(capture.modules) > 1 else folder
        subject = subject_of(module.original)
        found = bisect_findings.bisect_module(subject, pipeline, inside, tell)
        findings.append(found)
        if found.culprit and not module.rewritten:
            say(
                f"{found.name}: nothing is bound in it, so outside of this bisection "
                "XLA gets it as it is written"
            )
    return findings


def _own_target() -> Any:
    """The device that programs run on here."""
    import jax

    from hlo_tools.targets import Target

    return Target.from_devices(jax.local_devices()[:1])
