"""A tolerant parser of HLO text.

It reads what a C++ build of XLA prints and what people cut out of it: truncated
files, modules without a header, comments, unknown attributes, element types and
sections. What it does not understand is kept in `HloModule.unparsed` and warned about
once a file; it raises for nothing but text in which there is no HLO at all.
"""

import re
import sys
import warnings
from collections.abc import Callable

from hlo_tools.errors import HloToolsError
from hlo_tools.hlo import header, lexer
from hlo_tools.hlo.ir import HloComputation, HloInstruction, HloModule, Unparsed
from hlo_tools.hlo.shapes import parse_shape

# Opcodes whose parentheses hold no names of operands.
_PAYLOADS = frozenset(("constant", "parameter"))
_LONGEST_REASON = 60
_OPERAND = re.compile(
    rf"{lexer.SPACE}(?:{lexer.SHAPE}{lexer.SPACE})?%?({lexer.NAME}){lexer.SPACE}(?:,|$)",
    re.DOTALL,
)
_PLAIN_OPERANDS = re.compile(r"%?[^\s,=(){}\[\]%\"/]+(?:,\s*%?[^\s,=(){}\[\]%\"/]+)*+")


class HloParseError(HloToolsError):
    """Text in which there is no HLO."""


class HloParseWarning(UserWarning):
    """Part of a text was not understood; it is in `HloModule.unparsed`."""


def parse_text(
    text: str, filename: str = "", progress: Callable[[int], None] | None = None
) -> HloModule:
    """Parses HLO text.

    Args:
        text: a module, or computations without a header.
        filename: for messages.
        progress: called now and then with the position in `text`.

    Returns:
        The module, linked. `is_complete` says whether all of it was understood.

    Raises:
        HloParseError: there is no computation and no header in it.
    """
    module = _Parser(text, filename, progress).parse()
    _warn(module)
    return module


class _Parser:
    """State of one parse: the text, the position and the module so far."""

    def __init__(
        self, text: str, filename: str, progress: Callable[[int], None] | None
    ):
        self.text = text
        self.position = 0
        self.module = HloModule(filename=filename)
        self.progress = progress
        self._line, self._line_at = 1, 0

    def parse(self) -> HloModule:
        text, end = self.text, len(self.text)
        while True:
            self.skip_space()
            if self.position >= end:
                break
            if self.progress is not None:
                self.progress(self.position)
            if not (
                self.parse_header() or self.parse_table() or self.parse_computation()
            ):
                self.skip_unknown("expected a computation")
        if not self.module.computations and not self.module.name:
            start = " ".join(text[:200].split())[:_LONGEST_REASON]
            raise HloParseError(
                f"{self.module.filename or '<text>'}: no HLO in it: expected HloModule "
                f"or a computation, got {start!r}"
            )
        self.module.link()
        return self.module

    def skip_space(self) -> None:
        found = lexer.SKIP.match(self.text, self.position)
        if found is not None:
            self.position = found.end()

    def line(self, position: int) -> int:
        """Number of the line that a position is in; positions only grow."""
        self._line += self.text.count("\n", self._line_at, position)
        self._line_at = position
        return self._line

    def parse_header(self) -> bool:
        found = lexer.MODULE.match(self.text, self.position)
        if found is None or self.module.name:
            return False
        self.module.name = found[1]
        self.position = found.end()
        self.module.attributes = self.parse_attributes()
        return True

    def parse_table(self) -> bool:
        after = header.parse_table(self.text, self.position, self.module.stack)
        if after is None:
            return False
        self.position = after
        return True

    def parse_computation(self) -> bool:
        found = lexer.COMPUTATION.match(self.text, self.position)
        if found is None:
            return False
        computation = HloComputation(
            sys.intern(found[2]),
            signature=lexer.without_comments(found[3] or ""),
            is_entry=bool(found[1]),
        )
        if found[4]:
            computation.attributes = _attributes_in(found[4])
        self.position = found.end()
        self.module.computations.append(computation)
        self.parse_body(computation)
        return True

    def parse_body(self, computation: HloComputation) -> None:
        """Reads instructions up to the closing brace, or to the end of the text."""
        text, end = self.text, len(self.text)
        while True:
            self.skip_space()
            if self.position >= end:
                computation.is_complete = False
                return
            if text[self.position] == "}":
                self.position += 1
                computation.attributes.update(self.parse_attributes())
                return
            instruction = self.parse_instruction()
            if instruction is not None:
                computation.instructions.append(instruction)
            elif lexer.COMPUTATION.match(text, self.position):
                computation.is_complete = False  # its end is missing
                return
            else:
                self.skip_unknown("expected an instruction")

    def parse_instruction(self) -> HloInstruction | None:
        found = lexer.INSTRUCTION.match(self.text, self.position)
        if found is None or _runs_over(found):
            return None
        root, name, shape, opcode, operands = found.groups()
        line = self.line(self.position)
        self.position = found.end()
        names, payload = _operands(opcode, operands)
        return HloInstruction(
            sys.intern(name),
            parse_shape(lexer.without_comments(shape)),
            sys.intern(opcode),
            names,
            payload,
            self.parse_attributes(),
            root is not None,
            line,
        )

    def parse_attributes(self) -> dict[str, str]:
        """The `, key=value`s that follow; a key without a value has ""."""
        attributes: dict[str, str] = {}
        text, match = self.text, lexer.ATTRIBUTE.match
        while found := match(text, self.position):
            key, value = found[1], found[2]
            if value == "" or _runs_over(found):
                break  # cut: `key=` and an open bracket
            self.position = found.end()
            attributes.setdefault(
                sys.intern(key), lexer.without_comments(value) if value else ""
            )
        return attributes

    def skip_unknown(self, reason: str) -> None:
        """Keeps the text up to where another statement may begin."""
        start = self.position
        newline = self.text.find("\n", start)
        found = None
        if newline >= 0:
            found = lexer.STATEMENT_START.search(self.text, newline + 1)
        self.position = len(self.text) if found is None else found.start()
        text = self.text[start : self.position].rstrip()
        self.module.unparsed.append(Unparsed(self.line(start), text, reason))


def _runs_over(found: re.Match[str]) -> bool:
    """Whether a match took in the next instruction, for a bracket that is cut off."""
    if "\n" not in found[0]:
        return False
    return lexer.INSTRUCTION_LINE.search(found[0]) is not None


def _operands(opcode: str, text: str) -> tuple[tuple[str, ...], str]:
    """Names of the operands, or the text where it is no list of names."""
    if opcode in _PAYLOADS:
        return (), lexer.without_comments(text).strip()
    if not text or text.isspace():
        return (), ""
    if _PLAIN_OPERANDS.fullmatch(text):
        return tuple(
            [sys.intern(part.strip().removeprefix("%")) for part in text.split(",")]
        ), ""
    names, position = [], 0
    while position < len(text):
        found = _OPERAND.match(text, position)
        if found is None:
            return (), lexer.without_comments(text).strip()
        names.append(sys.intern(found[1]))
        position = found.end()
    return tuple(names), ""


def _attributes_in(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in lexer.split(text):
        key, _, value = part.partition("=")
        found[key.strip()] = value.strip()
    return found


def _warn(module: HloModule) -> None:
    """One warning for all that was not understood."""
    problems = []
    if module.unparsed:
        first = module.unparsed[0]
        text = " ".join(first.text.split())
        if len(text) > _LONGEST_REASON:
            text = f"{text[:_LONGEST_REASON]} ..."
        problems.append(
            f"{len(module.unparsed)} statements kept as text, the first in line "
            f"{first.line}: {first.reason}, got {text!r}"
        )
    cut = [c.name for c in module.computations if not c.is_complete]
    if cut:
        problems.append(f"the text ends inside of {', '.join(cut[:3])}")
    types = sorted(
        {
            array.element_type
            for shape in {i.shape for i in module.instructions()}
            if not shape.is_known
            for array in shape.arrays()
            if not array.is_known
        }
    )
    if types:
        problems.append(f"unknown element types {', '.join(types[:5])}")
    if problems:
        name = module.filename or module.name or "<text>"
        message = f"{name}: {'; '.join(problems)}"
        warnings.warn(HloParseWarning(message), stacklevel=3)
