"""Run a Python program, unmodified, with every jit in it treated.

What `hlo-tools run` does: the stage is put in force, then the program is run in this
process as `python script.py` or `python -m module` would run it. It is the main
module, finds its own name and arguments in `sys.argv` and its own folder first in
`sys.path`, and its tracebacks start with its own frames. All of that stays in place
afterwards, for threads and exit handlers of the program: call this once, from a
process that is about to end.

Processes that the program starts are not treated.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hlo_tools import stage
from hlo_tools.report import RewriteReport
from hlo_tools.report_merge import merge

if TYPE_CHECKING:
    from hlo_tools.driver import StageConfig

OnModule = Callable[[stage.StagedModule], None] | None

FAILED, NOT_FOUND, INTERRUPTED = 1, 2, 130  # python's own; 128 + SIGINT


def run_script(
    path: str | os.PathLike[str],
    args: Sequence[str],
    config: StageConfig,
    report: str | os.PathLike[str] | None = None,
    modules: OnModule = None,
) -> int:
    """Run a file as `python path args...` would.

    Args:
        path: a Python file.
        args: what follows its name in `sys.argv`.
        config: what the stage does.
        report: where the report of all compiles goes when the program has ended,
            in the format that the name ends in: .json, .html, else text; "-" is
            text on stdout.
        modules: called with each module that goes through the stage.

    Returns:
        The exit status that python would end with.
    """
    file = os.path.abspath(path)
    try:
        with io.open_code(file) as opened:
            source = opened.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        print(f"hlo-tools: can't open file {file!r}: {reason}", file=sys.stderr)
        return NOT_FOUND
    program = _script(path, file, source, args)
    return _run(program, Path(file).name, config, report, modules)


def run_program(name: str, args: Sequence[str], is_module: bool) -> int:
    """Run a file, or a module, as python would, and install nothing.

    Returns:
        The exit status, when the program and its threads have ended.
    """
    if is_module:
        program = _module(name, args)
    else:
        file = os.path.abspath(name)
        with io.open_code(file) as opened:
            program = _script(name, file, opened.read(), args)
    status = _status_of(program)
    _join_threads()
    return status


def _script(path: Any, file: str, source: bytes, args: Sequence[str]) -> Callable:
    """What runs a file, once `sys.argv` and `sys.path` are as python sets them."""
    sys.argv[:] = [os.fspath(path), *args]
    _set_first_path(os.path.dirname(os.path.realpath(file)))
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    names = {"__file__": file, "__loader__": loader, "__package__": None}

    def program() -> None:
        code = compile(source, file, "exec", dont_inherit=True)
        _execute(code, {**names, "__spec__": None})

    return program


def run_module(
    name: str,
    args: Sequence[str],
    config: StageConfig,
    report: str | os.PathLike[str] | None = None,
    modules: OnModule = None,
) -> int:
    """Run a module or package as `python -m name args...` would.

    Args:
        name: dotted name of a module, or of a package that has a `__main__`.
        args: as for `run_script`.
        config: as for `run_script`.
        report: as for `run_script`.
        modules: as for `run_script`.

    Returns:
        The exit status that python would end with.
    """
    return _run(_module(name, args), name, config, report, modules)


def _module(name: str, args: Sequence[str]) -> Callable:
    """What runs a module, once `sys.argv` and `sys.path` are as python sets them."""
    sys.argv[:] = ["-m", *args]  # what the packages above the module see
    _set_first_path(os.getcwd())

    def program() -> None:
        spec, code = _find(name)
        sys.argv[0] = spec.origin or name
        names = {"__file__": spec.origin, "__cached__": spec.cached}
        names |= {"__loader__": spec.loader, "__package__": spec.parent}
        _execute(code, {**names, "__spec__": spec})

    return program


def _set_first_path(folder: str) -> None:
    """Put the program's folder where python has put that of its own program."""
    if sys.flags.safe_path:
        return
    sys.path[:1] = [folder]


def _find(name: str) -> tuple[importlib.machinery.ModuleSpec, types.CodeType]:
    """The spec and the code of a module that can be run."""
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError) as error:
        parent = name.rpartition(".")[0]
        if isinstance(error, ModuleNotFoundError) and not _names(error, parent):
            raise  # an import inside one of the packages above
        _refuse(f"No module named {name}")
    if spec is None:
        _refuse(f"No module named {name}")
    if spec.submodule_search_locations is not None:
        inner = f"{name}.__main__"
        if name.endswith(".__main__") or importlib.util.find_spec(inner) is None:
            _refuse(f"{name} is a package without a __main__ to run")
        return _find(inner)
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if code is None:
        _refuse(f"No code object available for {name}")
    return spec, code


def _names(error: ModuleNotFoundError, parent: str) -> bool:
    """Whether what was not found is `parent`, or a package above it."""
    missing = error.name or ""
    return parent == missing or parent.startswith(f"{missing}.")


def _refuse(message: str) -> NoReturn:
    print(f"hlo-tools: {message}", file=sys.stderr)
    raise SystemExit(FAILED)


# The main module that was before; its globals are in use further up the stack.
_replaced: list[types.ModuleType] = []


def _execute(code: types.CodeType, names: dict[str, Any]) -> None:
    module = types.ModuleType("__main__")
    module.__dict__.update(names, __builtins__=builtins)
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _run(
    program, name: str, config: StageConfig, report: Any, modules: OnModule
) -> int:
    if report is not None and not Path(report).parent.is_dir():
        # before the program runs: its report would be lost
        print(f"hlo-tools: {report}: no such folder", file=sys.stderr)
        return NOT_FOUND
    installation = stage.install(
        passes=config.passes,
        exactness=config.exactness,
        verify=config.verify,
        modules=modules,
    )
    status = _status_of(program)
    _join_threads()
    if report is None:
        return status
    merged = merge(installation.reports(), name)
    if stage.is_off():
        merged.notes.append("HLO_TOOLS switches the stage off: nothing was searched")
    try:
        _write(merged, os.fspath(report))
    except OSError as error:
        print(f"hlo-tools: {report}: {error.strerror or error}", file=sys.stderr)
        return status or NOT_FOUND
    return status


def _join_threads() -> None:
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()  # it may still compile something


def _status_of(program) -> int:
    """Run the program; what python would print and end with if it fails."""
    try:
        program()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0)
        print(error.code, file=sys.stderr)
        return FAILED
    except BaseException as error:
        _show(error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return 0


def _show(error: BaseException) -> None:
    """Print an exception as python would, without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    error = error.with_traceback(frames)
    sys.last_exc = error
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
    try:
        sys.excepthook(type(error), error, frames)
    except Exception:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exc()
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, frames)


def _write(report: RewriteReport, destination: str) -> None:
    if destination == "-":
        sys.stdout.write(report.text(color=_wants_color()))
        return
    suffix = Path(destination).suffix.lower()
    if suffix == ".json":
        text = report.to_json() + "\n"
    elif suffix in (".html", ".htm"):
        text = report.html()
    else:
        text = report.text()
    Path(destination).write_text(text, encoding="utf-8")


def _wants_color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
