"""Where the results of `hlo-tools` go: files and streams, and a sign of progress."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from hlo_tools.errors import HloToolsError
from hlo_tools.report import RewriteReport

FORMATS = ("text", "json", "html")
_SUFFIXES = {".json": "json", ".html": "html", ".htm": "html", ".txt": "text"}
_PROGRESS_AFTER_SECONDS = 1.0


def say(message: str) -> None:
    """A diagnostic, on stderr."""
    print(f"hlo-tools: {message}", file=sys.stderr)


def read_module(file: str) -> tuple[str | bytes, str]:
    """The MLIR in `file` ("-" is stdin) and the name to call it by in messages.

    Raises:
        HloToolsError: it can not be read, or is neither text nor MLIR bytecode.
    """
    name = "<stdin>" if file == "-" else file
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise HloToolsError(f"{name}: {error.strerror or error}") from error
    if data.startswith(b"ML\xefR"):
        return data, name
    try:
        return data.decode(), name
    except UnicodeDecodeError as error:
        raise HloToolsError(f"{name}: neither UTF-8 text nor MLIR bytecode") from error


def write_text(destination: str, text: str) -> None:
    """Write `text` to a file, or to stdout for "-".

    Raises:
        HloToolsError: the file can not be written.
    """
    if destination == "-":
        sys.stdout.write(text)
        return
    try:
        Path(destination).write_text(text, encoding="utf-8")
    except OSError as error:
        raise HloToolsError(f"{destination}: {error.strerror or error}") from error


def report_format(destination: str) -> str:
    """The form that a report takes in `destination`: "text", "json" or "html".

    Raises:
        HloToolsError: the file's name does not say.
    """
    if destination == "-":
        return "text"
    suffix = Path(destination).suffix.lower()
    if suffix not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        raise HloToolsError(
            f"--report {destination}: the name says no format; end it in {known}, "
            "or give - for text on stdout"
        )
    return _SUFFIXES[suffix]


def render(report: RewriteReport, form: str, color: bool = False) -> str:
    """The report in one of `FORMATS`."""
    if form == "json":
        return report.to_json() + "\n"
    if form == "html":
        return report.html()
    return report.text(color=color)


def wants_color() -> bool:
    """Whether stdout shows colors: a terminal, and NO_COLOR is not set."""
    return (
        sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


@contextlib.contextmanager
def progress(message: str) -> Iterator[Callable[[str], None]]:
    """Show `message` with a spinner on stderr while the body takes over a second.

    Nothing is shown, and rich not loaded, where stderr is no terminal.

    Yields:
        A function that adds a few words on what is being done to the message.
    """
    if not sys.stderr.isatty():
        yield lambda words: None
        return
    import rich.console

    status = rich.console.Console(stderr=True).status(message)
    timer = threading.Timer(_PROGRESS_AFTER_SECONDS, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda words: status.update(f"{message}: {words}")
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what the body prints to stderr, that of child processes included."""
    sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr):
        try:
            kept = os.dup(1)
        except OSError:  # stdout is closed
            yield
            return
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def silence_stdout() -> None:
    """Let nothing more be written to a stdout whose reader has gone."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
