"""Every error this package raises on purpose; all are `HloToolsError`s."""

import difflib
from collections.abc import Iterable


class HloToolsError(Exception):
    """Base of the package's errors."""


class UnsupportedError(HloToolsError):
    """Something can not run here. The message is the reason, as a sentence."""


class UnknownNameError(HloToolsError):
    """A pass, target, flag or other name that is in no table.

    Args:
        kind: what the name was meant to be ("pass", "target").
        name: what was given.
        known: the names there are.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]):
        self.kind, self.name, self.known = kind, name, tuple(known)
        self.closest = tuple(difflib.get_close_matches(name, self.known, n=3))
        if self.closest:
            hint = f"did you mean {' or '.join(self.closest)}?"
        else:
            hint = f"known: {', '.join(self.known) or '(none)'}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")

    def __reduce__(self):
        return type(self), (self.kind, self.name, self.known)


class PassSpecError(HloToolsError):
    """A pass pipeline spec that does not parse."""


class MlirParseError(HloToolsError):
    """MLIR text that does not parse.

    Args:
        filename: the file, or a name for text that has none.
        line: 1-based line of the first error.
        message: what MLIR says about it.
    """

    def __init__(self, filename: str, line: int, message: str):
        self.filename, self.line, self.message = filename, line, message
        super().__init__(f"{filename}:{line}: {message}")

    def __reduce__(self):
        return type(self), (self.filename, self.line, self.message)


class VerificationError(HloToolsError):
    """A rewritten program that is malformed or computes something else."""


class UnsupportedJaxError(HloToolsError):
    """The JAX at hand lacks something that the stage needs."""


class KernelConfigError(HloToolsError):
    """A kernel's configuration or problem that is malformed or can not run."""


class MeasuredTableError(HloToolsError):
    """A file of measured times that can not be read, or is of another format."""


# Some errors of MLIR end in the text of a whole operation.
_LONGEST = 600


def describe_error(error: BaseException) -> str:
    """Returns an exception as one line that is led by its type.

    MLIR's errors say what is wrong in the lines after the first, so they are kept.
    """
    text = " ".join(str(error).split()) or "(no text)"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ..."
    return f"{type(error).__name__}: {text}"
