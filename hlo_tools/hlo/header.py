"""What stands before the computations of a module: its header and source tables."""

import re
from typing import NamedTuple

from hlo_tools.hlo import attributes as read
from hlo_tools.hlo import lexer
from hlo_tools.hlo.shapes import Shape
from hlo_tools.hlo.stack import StackTables

TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
TABLE = re.compile(rf"({'|'.join(TABLES)})[ \t]*(?=\n|$)")
_ROW = re.compile(rf"\s*+(\d+)[ \t]++({lexer.STRING}|\{{[^{{}}]*+\}})")
_ALIAS = re.compile(
    r"\{([\d,\s]*)\}\s*:\s*\(\s*(\d+)\s*,\s*\{([\d,\s]*)\}\s*(?:,\s*([\w\-]+))?\s*\)"
)


class Alias(NamedTuple):
    """A result that takes the buffer of a parameter.

    Attributes:
        output: index of the result in the output tuple.
        parameter: number of the parameter.
        index: index inside the parameter.
        kind: "may-alias" or "must-alias".
    """

    output: tuple[int, ...]
    parameter: int
    index: tuple[int, ...]
    kind: str


def parse_table(text: str, position: int, stack: StackTables) -> int | None:
    """Reads a table of source lines into `stack`.

    Returns:
        The position after it, or None if there is none at `position`.
    """
    found = TABLE.match(text, position)
    if found is None:
        return None
    position = found.end()
    while row := _ROW.match(text, position):
        position = row.end()
        _add_row(found[1], int(row[1]), row[2], stack)
    return position


def _add_row(table: str, number: int, value: str, stack: StackTables) -> None:
    if table in ("FileNames", "FunctionNames"):
        names = stack.files if table == "FileNames" else stack.functions
        names[number] = lexer.unquote(value)
        return
    fields = {
        key: int(digits)
        for key, digits in read.fields(value).items()
        if digits.lstrip("-").isdigit()
    }
    if table == "FileLocations":
        stack.locations[number] = fields
    else:
        location = fields.get("file_location_id", 0)
        stack.stack[number] = (location, fields.get("parent_frame_id", 0))


def print_tables(stack: StackTables) -> str:
    """The tables as HLO text, or "" if there are none."""
    rows: dict[str, list[str]] = {
        "FileNames": [f'{n} "{_quoted(name)}"' for n, name in stack.files.items()],
        "FunctionNames": [
            f'{n} "{_quoted(name)}"' for n, name in stack.functions.items()
        ],
        "FileLocations": [
            f"{n} {{{' '.join(f'{k}={v}' for k, v in fields.items())}}}"
            for n, fields in stack.locations.items()
        ],
        "StackFrames": [
            f"{n} {{file_location_id={location} parent_frame_id={parent}}}"
            for n, (location, parent) in stack.stack.items()
        ],
    }
    if not any(rows.values()):
        return ""
    return "\n\n".join("\n".join([name, *rows[name]]) for name in TABLES) + "\n\n"


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def parse_aliases(text: str) -> tuple[Alias, ...]:
    """The entries of { {0}: (0, {}, may-alias), ... }."""
    return tuple(
        Alias(read.ints(out), int(number), read.ints(index), kind or "may-alias")
        for out, number, index, kind in _ALIAS.findall(text)
    )


def parse_entry_layout(text: str) -> tuple[tuple[Shape, ...], Shape] | None:
    """Parameters and result of {(f32[2]{0}, ...)->f32[2]{0}}; None for other text."""
    body = lexer.without_comments(lexer.inside(text)).strip()
    parameters = re.match(rf"\(({lexer.BALANCED})\)\s*->\s*", body, re.DOTALL)
    if parameters is None:
        return None
    shapes = tuple(Shape.parse(part) for part in lexer.split(parameters[1]))
    return shapes, Shape.parse(body[parameters.end() :])
