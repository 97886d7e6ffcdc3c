"""`hlo-tools tune`: measure a kernel's configurations, score and explain the model."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hlo_tools.cli_output import FORMATS, say, wants_color
from hlo_tools.cli_parsing import check_choice
from hlo_tools.errors import HloToolsError, UnknownNameError

OK, FINDINGS = 0, 1


def tune(
    family: Annotated[
        str, typer.Argument(metavar="FAMILY", help="Kernel, such as attention-forward.")
    ],
    problems: Annotated[
        str,
        typer.Option(
            metavar="FILE|PRESET",
            help="What to measure: JSON, a list of problems, or a preset's name.",
        ),
    ] = "small",
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="cpu, h200, ...; the one at hand unless given. To measure, it must be "
            "at hand.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The table, added to if it is there; the package's own unless given.",
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE", help="Measure nothing: score the model against a table."
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="PROBLEM",
            help="Measure nothing: show the candidates and the pick for a problem, "
            "JSON or PRESET:NUMBER.",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Processes that compile side by side; they take turns to run.",
        ),
    ] = 1,
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="text or json.")
    ] = "text",
) -> Callable[[], int]:
    """Measure all configurations of a kernel, and score the model that picks one.

    Exit status 1 when a problem could not be measured.
    """
    check_choice("format", form, FORMATS[:2])
    if score is not None and explain is not None:
        raise HloToolsError("give --score or --explain, not both")
    if score is not None:
        return partial(run_score, family, score, device, form)
    if explain is not None:
        return partial(run_explain, family, explain, device, form)
    return partial(run_tune, family, problems, device, output, workers, form)


def run_explain(family: str, problem: str, device: str | None, form: str) -> int:
    """Prints the candidates for a problem, their predictions, and the pick."""
    from pallas_kernels.explanation import explanation_dict, explanation_text
    from pallas_kernels.families import load_family
    from pallas_kernels.tuning import ConfigSelector

    row = load_family(family)
    selector = ConfigSelector(row, _target(device))
    found = selector.explain(_one_problem(row, problem))
    if form == "json":
        print(json.dumps(explanation_dict(found), indent=2))
    else:
        sys.stdout.write(explanation_text(found, color=wants_color()))
    return OK


def run_score(family: str, file: str, device: str | None, form: str) -> int:
    """Prints how the model's picks compare with the fastest of a table."""
    from hlo_tools.targets import Target
    from pallas_kernels.families import load_family
    from pallas_kernels.measured import load_table

    table = load_table(Path(file))
    if not table.entries:
        raise HloToolsError(f"{file}: has no entries")
    target = Target.parse(device or table.device_kind)
    _print_scores(load_family(family), table, target, form)
    return OK


def run_tune(
    family: str,
    problems: str,
    device: str | None,
    output: str | None,
    workers: int,
    form: str,
) -> int:
    """Measures, writes the table, and prints the model's scores against it."""
    from pallas_kernels.families import load_family
    from pallas_kernels.measured import table_path
    from pallas_kernels.measuring import tune as measure_and_save

    row = load_family(family)
    wanted = _problems(row, problems)
    if workers > 1:  # this process needs no memory of the device
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    target = _target(None)
    if device is not None and _target(device).spec.name != target.spec.name:
        raise HloToolsError(
            f"--device {device} is not at hand: here is {target.device_kind}"
        )
    path = Path(output) if output else table_path(row.name, target.device_kind)
    with _progress_bar(f"measuring {row.name}") as tell:
        table, notes = measure_and_save(
            row, wanted, target, path, tell, workers=workers
        )
    for note in notes:
        say(note)
    if not table.entries:
        raise HloToolsError(f"nothing was measured on {target.device_kind}")
    say(f"{len(table.entries)} of {len(wanted)} problems are in {path}")
    _print_scores(row, table, target, form)
    return OK if len(table.entries) == len(set(wanted)) else FINDINGS


def _print_scores(family: Any, table: Any, target: Any, form: str) -> None:
    from pallas_kernels import scoring

    scores = scoring.score(family, table, target)
    if form == "json":
        print(json.dumps(scoring.scores_dict(scores, family.key), indent=2))
    else:
        sys.stdout.write(scoring.scores_text(scores, family.key))


def _target(device: str | None) -> Any:
    """The named device, or the one at hand."""
    from hlo_tools.targets import Target

    if device is not None:
        return Target.parse(device)
    import jax

    return Target.from_devices(jax.devices()[:1])


def _preset(family: Any, name: str) -> tuple[Any, ...]:
    if name not in family.presets:
        raise UnknownNameError("preset", name, family.presets)
    return family.presets[name]()


def _problems(family: Any, given: str) -> tuple[Any, ...]:
    """The problems of a file, or of a preset."""
    if not given.endswith(".json"):
        return _preset(family, given)
    try:
        rows = json.loads(Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise HloToolsError(f"{given}: {error.strerror or error}") from error
    except ValueError as error:
        raise HloToolsError(f"{given}: no JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise HloToolsError(f"{given}: expected a list of problems")
    return tuple(family.problem_of(json.dumps(row)) for row in rows)


def _one_problem(family: Any, given: str) -> Any:
    """A problem from JSON, or the number of one in a preset, from 0."""
    if given.lstrip().startswith("{"):
        return family.problem_of(given)
    name, _, number = given.partition(":")
    found = _preset(family, name)
    if not number.isdigit() or int(number) >= len(found):
        raise HloToolsError(
            f"{given}: give {name}:0 to {name}:{len(found) - 1}, or a problem as JSON"
        )
    return found[int(number)]


@contextlib.contextmanager
def _progress_bar(message: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[what]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(message, total=None, what="")
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, what=what
        )
