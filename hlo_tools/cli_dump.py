"""`hlo-tools dump`: run a program and keep every form its functions take."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hlo_tools.cli_commands import Program
from hlo_tools.cli_options import Arguments, ModuleName
from hlo_tools.cli_output import progress, say
from hlo_tools.errors import HloToolsError


def dump(
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="Where it goes.")
    ],
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="A Python program.")
    ] = None,
    args: Arguments = None,
    module: ModuleName = None,
    passes: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX", help="Keep the HLO after these XLA passes too; .* is all."
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Only modules of such a name, as jit_step."),
    ] = None,
    stage: Annotated[
        bool, typer.Option("--stage", help="Treat every jit, as `hlo-tools run` does.")
    ] = False,
) -> Callable[[], int]:
    """Run a program and keep, for each compile, its StableHLO and HLO.

    The program is run as it is written: what it decorates with hlo_tools.jit goes
    through the stage, and its other jits do not unless --stage is given. The exit
    status is the program's.
    """
    program = Program.of(script, args, module)
    return partial(run, program, output, passes, only, stage)


def run(
    program: Program, output: str, passes: str | None, only: str | None, stage: bool
) -> int:
    """Runs it; the program's own exit status."""
    from hlo_tools import stage as stages
    from hlo_tools import stage_compile
    from hlo_tools._jax import seam_problem
    from hlo_tools.dumping import Dumper
    from hlo_tools.runner import run_program

    if problem := seam_problem():
        raise HloToolsError(f"compiles can not be seen: {problem}")
    if not program.is_module and not Path(program.name).is_file():
        raise HloToolsError(f"{program.name}: no such file")
    dumper = Dumper(output, passes, only)
    with stage_compile.watch_compiles(dumper, all_threads=True):
        if stage:
            stages.install()
        try:
            status = run_program(
                program.name, list(program.arguments), program.is_module
            )
        finally:
            with progress("writing the index"):
                dumper.finish()
    rewritten = sum(r.stage == "rewritten" for r in dumper.records)
    say(
        f"{len(dumper.records)} programs, {rewritten} rewritten, in {output}/index.html"
    )
    return status
