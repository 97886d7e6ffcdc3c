"""`hlo-tools diff`: what differs between two modules, or from a baseline."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hlo_tools.cli_commands import stay_off_devices
from hlo_tools.cli_output import FORMATS, progress, report_format, say, write_text
from hlo_tools.cli_parsing import check_choice
from hlo_tools.errors import HloToolsError

SAME, DIFFERENT = 0, 1


def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="HLO text or proto, StableHLO, or a dump folder."
        ),
    ],
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="What to compare it with.")
    ] = None,
    ignore: Annotated[
        str,
        typer.Option(
            metavar="WORDS",
            help="What not to look at, with commas between: shapes, types, constants, "
            "attributes, fusions, moved, operand-order, copies, layouts, sharding, "
            "frontend-attributes, control, aliasing, header, schedule, "
            "backend-config, metadata.",
        ),
    ] = "",
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Compare A with the fingerprint in FILE, without a B."
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Write A's fingerprint to the baseline.")
    ] = False,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="text, json or html."),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where it goes; .json or .txt says the format.",
        ),
    ] = "-",
) -> Callable[[], int]:
    """Say what differs between two programs: their graphs, not their texts.

    Names, numbers, metadata and the order of a text are no difference.

    Exit status 0 when they are the same, 1 when they differ, 2 on an error.
    """
    form = form or report_format(output)
    check_choice("format", form, FORMATS)
    words = tuple(word.strip() for word in ignore.split(",") if word.strip())
    if baseline is not None:
        if b is not None:
            raise HloToolsError("--baseline takes one module: A, without a B")
        check_choice("format", form, FORMATS[:2])
        return partial(_compare_baseline, a, baseline, update, words, form, output)
    if update:
        raise HloToolsError("--update writes a baseline: give --baseline FILE")
    if b is None:
        raise HloToolsError("nothing to compare with: give B, or --baseline FILE")
    return partial(_compare, a, b, words, form, output)


def _compare(a: str, b: str, ignore: tuple[str, ...], form: str, output: str) -> int:
    stay_off_devices()
    from hlo_tools.hlo import parse
    from hlo_tools.hlo.diff import diff as compare

    folders = [os.path.isdir(name) for name in (a, b)]
    for name in (a, b):
        if not os.path.exists(name):
            raise HloToolsError(f"{name}: no such file or folder")
    with progress(f"comparing {Path(a).name} with {Path(b).name}") as tell:
        if all(folders):
            from hlo_tools.hlo.diff_folders import diff_folders

            if form == "html":
                raise HloToolsError(
                    "a page shows two modules, not folders: name a file of each"
                )
            result: Any = diff_folders(a, b, ignore, tell)
            modules = ()
        else:
            modules = parse(Path(a)), parse(Path(b))
            result = compare(*modules, ignore)
        text = _render(result, modules, form)
    write_text(output, text)
    return SAME if result.is_same else DIFFERENT


def _render(result: Any, modules: tuple[Any, ...], form: str) -> str:
    if form == "json":
        return json.dumps(result.as_dict(), indent=2) + "\n"
    if form == "html":
        from hlo_tools.hlo.diff_html import page

        return page(result, *modules)
    return result.text()


def _compare_baseline(
    file: str,
    baseline: str,
    update: bool,
    ignore: tuple[str, ...],
    form: str,
    output: str,
) -> int:
    stay_off_devices()
    from hlo_tools.hlo import baseline as baselines
    from hlo_tools.hlo import parse
    from hlo_tools.hlo.baseline_diff import compare

    if not os.path.exists(file):
        raise HloToolsError(f"{file}: no such file or folder")
    with progress(f"reading {Path(file).name}"):
        fingerprint = baselines.fingerprint(parse(Path(file)), ignore)
    if update:
        write_text(baseline, baselines.dumps(fingerprint))
        say(f"{baseline}: written, {fingerprint['instructions']} instructions")
        return SAME
    result = compare(baselines.load(baseline), fingerprint, ignore)
    if form == "json":
        write_text(output, json.dumps(result.as_dict(), indent=2) + "\n")
    else:
        write_text(output, result.text())
    return SAME if result.is_same else DIFFERENT
