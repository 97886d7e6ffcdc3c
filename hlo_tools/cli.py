"""The command line: `hlo-tools run`, `opt`, `explain`, `bisect`, `dump`, `diff`, ...

typer only parses: each subcommand returns what is to be done, and `main` does it
outside of the parser. So a script that `run` starts sees its own Ctrl-C and its
own broken pipe. Results go to stdout, diagnostics to stderr; the exit status is 0
when all is well, 1 when there are findings, 2 for a usage or internal error, and
for `run` the script's own.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from hlo_tools import cli_bisect, cli_cost, cli_diff, cli_dump, cli_tune
from hlo_tools import cli_commands as commands
from hlo_tools.cli_options import Arguments, Level, ModuleName, Passes
from hlo_tools.cli_output import FORMATS, say, silence_stdout
from hlo_tools.cli_parsing import (
    BisectCommand,
    ProgramCommand,
    ProgramOrModuleCommand,
    check_choice,
)
from hlo_tools.errors import HloToolsError, MlirParseError, UnknownNameError

OK, FINDINGS, ERROR = 0, 1, 2
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + SIGINT, 128 + SIGPIPE

Action = Callable[[], int]

app = typer.Typer(
    name="hlo-tools",
    help="One more compiler stage for JAX: find slow shapes in StableHLO, bind them "
    "to fast kernels, and say what was done and what was not.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Target = Annotated[
    str, typer.Option("--target", metavar="NAME", help="Device: cpu, h200, v5e, ...")
]
Report = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write the report here: .json, .html, .txt, or - for text on stdout.",
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(commands.version_line())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_show_version,
            help="Versions of hlo-tools and of what it runs on.",
        ),
    ] = False,
) -> None:
    pass


@app.command(cls=ProgramCommand)
def run(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="A Python program.")
    ] = None,
    args: Arguments = None,
    module: ModuleName = None,
    passes: Passes = "default",
    exactness: Annotated[
        str,
        typer.Option(metavar="LEVEL", help="bitwise, reassociating or approximate."),
    ] = "reassociating",
    verify: Annotated[
        bool, typer.Option("--verify", help="Check each bound site numerically.")
    ] = False,
    report: Report = None,
) -> Action:
    """Run an unmodified program with every jit in it treated.

    Options go before the program; what follows it is the program's.
    """
    program = commands.Program.of(script, args, module)
    check_choice("exactness", exactness, commands.EXACTNESS)
    return partial(commands.run, program, passes, exactness, verify, report)


@app.command()
def opt(
    file: Annotated[str, typer.Argument(metavar="FILE", help="MLIR text; - is stdin.")],
    passes: Passes = "default",
    target: Target = "cpu",
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="Where the MLIR goes."),
    ] = "-",
    report: Report = None,
    level: Level = None,
) -> Action:
    """Run passes on a StableHLO module: MLIR text in, MLIR text out."""
    passes = passes if level is None else f"O{level}"
    return partial(commands.opt, file, passes, target, output, report)


@app.command(cls=ProgramOrModuleCommand)
def explain(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="MLIR text (- is stdin), or a script."),
    ] = None,
    args: Arguments = None,
    module: ModuleName = None,
    passes: Passes = "default",
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="NAME",
            help="Device to explain for; cpu for MLIR, and a script's own device "
            "unless given.",
        ),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="text, json or html.")
    ] = "text",
) -> Action:
    """Say what is found, what it is bound to, and what is not and why.

    Exit status 1 when there are near misses or failed sites.
    """
    check_choice("format", form, FORMATS)
    program = commands.Program.of(file, args, module)
    return partial(commands.explain, program, passes, target, form)


app.command(cls=BisectCommand)(cli_bisect.bisect)
app.command(cls=BisectCommand)(cli_dump.dump)
app.command()(cli_cost.cost)
app.command()(cli_diff.diff)
app.command()(cli_tune.tune)


@app.command()
def passes(
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="text or json.")
    ] = "text",
) -> Action:
    """List the passes, their exactness and their options."""
    check_choice("format", form, FORMATS[:2])
    return partial(commands.passes, form)


def main(arguments: Sequence[str] | None = None) -> int:
    """The `hlo-tools` command.

    Args:
        arguments: what follows the command's name; None takes `sys.argv`.

    Returns:
        The exit status.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        action = parse(given)
        status = action() if callable(action) else int(action or OK)
        if not sys.stdout.closed:  # a script may have closed it
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        silence_stdout()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except MlirParseError as error:
        print(error, file=sys.stderr)  # file:line: message, as editors expect
        return ERROR
    except HloToolsError as error:
        say(f"error: {error}")
        return ERROR
    except Exception as error:
        traceback.print_exc()
        say(f"internal error: {type(error).__name__}: {error}")
        return ERROR


def parse(arguments: Sequence[str]) -> Action | int | None:
    """What the arguments ask for: an `Action`, or the status to exit with.

    Raises:
        HloToolsError: the arguments are wrong; the message says how.
    """
    if not arguments:
        arguments = ["--help"]
    try:
        return app(args=list(arguments), prog_name="hlo-tools", standalone_mode=False)
    except HloToolsError:
        raise
    except Exception as error:
        if not hasattr(error, "format_message"):  # not the parser's
            raise
        raise _usage_error(error) from error


def _usage_error(error: Any) -> HloToolsError:
    """The parser's complaint, with the closest names and where to look."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "hlo-tools"
    option = getattr(error, "option_name", None)
    if option is not None and "No such option" in str(error.message):
        known = [name for p in context.command.params for name in p.opts]
        return UnknownNameError("option", option, sorted(set(known) | {"--help"}))
    message = error.format_message().rstrip(".")
    if message.startswith("No such command"):
        name = message.split("'")[1] if "'" in message else message
        return UnknownNameError("command", name, sorted(context.command.commands))
    message = message[:1].lower() + message[1:]
    return HloToolsError(f"{message}; see {path} --help")
