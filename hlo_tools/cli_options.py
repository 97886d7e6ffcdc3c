"""Arguments and options that several subcommands of `hlo-tools` share."""

from typing import Annotated

import typer

Passes = Annotated[
    str, typer.Option("--passes", metavar="SPEC", help="Pipeline to run, in order.")
]
Level = Annotated[
    int | None,
    typer.Option(
        "-O", min=0, max=3, metavar="LEVEL", help="-O3 is the same as --passes O3."
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="What the program finds in sys.argv."),
]
ModuleName = Annotated[
    str | None,
    typer.Option("-m", metavar="MODULE", help="Run a module, as `python -m` does."),
]
