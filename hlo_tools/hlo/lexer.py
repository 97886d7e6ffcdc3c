"""The tokens of HLO text, as compiled expressions that match whole pieces of it.

HLO's grammar ignores line breaks, so everything here matches at a position of the
whole text. Python's possessive quantifiers keep each match linear in its length.
"""

import re
from collections.abc import Iterator

# Nesting of brackets in one statement. Backend configurations reach about ten.
_DEPTH = 40

STRING = r'"(?:[^"\\]|\\.)*+"'
_PLAIN = r'[^\[\](){}"]++'


def _balanced(depth: int) -> str:
    """What may stand between brackets, of any kind, nested up to `depth`."""
    inside = f"(?:{_PLAIN}|{STRING})*+"
    for _ in range(depth):
        inside = rf"(?:{_PLAIN}|{STRING}|[\[({{]{inside}[\])}}])*+"
    return inside


BALANCED = _balanced(_DEPTH)
SPACE = r"(?:\s++|/\*(?:[^*]|\*(?!/))*+\*/|//[^\n]*+)*+"
NAME = r'[^\s=,(){}\[\]%"]+'
# f32[2,3]{1,0}, a tuple (...), a buffer b(...), each with an optional layout
SHAPE = rf"(?:[A-Za-z]\w*+)?[\[(]{BALANCED}[\])](?:\{{{BALANCED}\}})?"

SKIP = re.compile(SPACE, re.DOTALL)
# name = shape opcode(operands)
INSTRUCTION = re.compile(
    rf"(ROOT\s++)?%?({NAME}){SPACE}={SPACE}({SHAPE}){SPACE}"
    rf"([A-Za-z][\w\-]*+){SPACE}\(({BALANCED})\)",
    re.DOTALL,
)
# , key=value or , word; a value may have a blank before a brace: mesh['x'=2] {'x'}
ATTRIBUTE = re.compile(
    rf"{SPACE},{SPACE}([A-Za-z_][\w.\-]*+)"
    rf"(?:\s*+=\s*+((?:[^,\s\[\](){{}}\"]++|{STRING}|[\[({{]{BALANCED}[\])}}]"
    r"|[ \t]++(?=\{))*+))?",
    re.DOTALL,
)
COMPUTATION = re.compile(
    rf"(ENTRY\s++)?%?({NAME}){SPACE}"
    rf"(\({BALANCED}\){SPACE}->{SPACE}(?:{SHAPE})){{0,1}}{SPACE}"
    rf"((?:,{SPACE}[\w.\-]++=(?:[^,\s{{]++|{STRING}))*+){SPACE}\{{",
    re.DOTALL,
)
MODULE = re.compile(rf"HloModule\s++({NAME})")
# Where a statement may begin, to go on after one that can not be read.
STATEMENT_START = re.compile(
    rf"^[ \t]*+(?:(?:ROOT\s++)?%?{NAME}\s*+=\s|\}}|(?:ENTRY\s++)?%?{NAME} ?(?:\(|\{{))",
    re.MULTILINE,
)
# A line that begins an instruction: inside of another one, that was cut.
INSTRUCTION_LINE = re.compile(
    rf"\n[ \t]*+(?:ROOT\s++)?%?{NAME} = {SHAPE} [A-Za-z][\w\-]*+\(", re.DOTALL
)

_COMMENT = re.compile(rf"({STRING})|/\*.*?\*/", re.DOTALL)
_PIECE = re.compile(rf"(?:[^,\[\](){{}}\"]++|{STRING}|[\[({{]{BALANCED}[\])}}])++")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def without_comments(text: str) -> str:
    """`text` without /* comments */, those in strings excepted."""
    if "/*" not in text:
        return text
    return _COMMENT.sub(lambda found: found[1] or "", text)


def split(text: str) -> Iterator[str]:
    """The parts of `text` between top-level commas, stripped, empty ones left out.

    Args:
        text: with balanced brackets; where they are not, what is left is one part.
    """
    position, end = 0, len(text)
    while position < end:
        found = _PIECE.match(text, position)
        if found is None:
            if text[position] == ",":
                position += 1
                continue
            yield text[position:].strip()  # an odd bracket
            return
        if piece := found[0].strip():
            yield piece
        position = found.end()


def inside(text: str) -> str:
    """`text` without the brackets around it, if there are any."""
    text = text.strip()
    if len(text) >= 2 and text[0] in "{([" and text[-1] in "})]":
        return text[1:-1]
    return text


def unquote(text: str) -> str:
    """A C-escaped "string" as the text that it means; other text as it is."""
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return text
    text = text[1:-1]
    return _ESCAPE.sub(_unescape, text) if "\\" in text else text


def _unescape(found: re.Match[str]) -> str:
    what = found[1]
    if what[0] == "x" and len(what) == 3:
        return chr(int(what[1:], 16))
    if what[0] in "01234567":
        return chr(int(what, 8) & 0xFF)
    return _ESCAPES.get(what, what)
