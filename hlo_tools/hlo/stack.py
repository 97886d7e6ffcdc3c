"""Lines of the user's program, as a module's tables of stack frames have them."""

from dataclasses import dataclass, field
from typing import NamedTuple


class SourceFrame(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str = ""
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class StackTables:
    """A module's tables of source lines, each from number to entry.

    Attributes:
        files, functions: names.
        locations: fields of a location: file_name_id, function_name_id, line, ...
        stack: (location, parent frame) of a frame.
    """

    files: dict[int, str] = field(default_factory=dict)
    functions: dict[int, str] = field(default_factory=dict)
    locations: dict[int, dict[str, int]] = field(default_factory=dict)
    stack: dict[int, tuple[int, int]] = field(default_factory=dict)

    def frames(self, frame: int) -> tuple[SourceFrame, ...]:
        """The lines of a stack frame and of its callers, the innermost first."""
        found, seen = [], set()
        while frame in self.stack and frame not in seen:
            seen.add(frame)
            location, parent = self.stack[frame]
            fields = self.locations.get(location)
            if fields is not None:
                found.append(
                    SourceFrame(
                        self.files.get(fields.get("file_name_id", 0), ""),
                        fields.get("line", 0),
                        self.functions.get(fields.get("function_name_id", 0), ""),
                        fields.get("column", 0),
                    )
                )
            frame = parent
        return tuple(found)
