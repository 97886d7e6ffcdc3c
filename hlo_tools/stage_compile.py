"""Between JAX's lowering and XLA: whether to rewrite a module, and what if it fails.

The user's program never fails because of the stage. Whatever goes wrong in a
rewrite, or in XLA's compile of a rewritten module, ends in the original module being
compiled, a note in the report and one warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.extend.mlir import ir

from hlo_tools import _jax, stage_marks
from hlo_tools.errors import PassSpecError, UnknownNameError, describe_error
from hlo_tools.report import RewriteReport
from hlo_tools.stage_marks import Mark, ReportLog

if TYPE_CHECKING:
    from hlo_tools.driver import StageConfig

_OFF = ("off", "0", "false", "no")


def is_off() -> bool:
    """Whether the environment variable HLO_TOOLS switches the stage off."""
    return os.environ.get("HLO_TOOLS", "").strip().lower() in _OFF


@dataclasses.dataclass(frozen=True)
class StagedModule:
    """A module that went through the stage.

    Attributes:
        original: MLIR text as JAX lowered it, with source locations.
        rewritten: whether XLA was given another module.
        config: what was asked for.
        report: what was done.
    """

    original: str
    rewritten: bool
    config: StageConfig
    report: RewriteReport


class Installation:
    """The stage in force for every jit of the process; a context manager.

    Attributes:
        config: what is done with modules that no decorated function is part of.
        log: reports of all compiles while it is in force.
        on_report: called with the report of each compile.
        on_module: called with each module before it is compiled.
    """

    def __init__(
        self,
        config: StageConfig | None,
        on_report: Callable[[RewriteReport], None] | None = None,
        on_module: Callable[[StagedModule], None] | None = None,
    ):
        self.config = config
        self.log = ReportLog()
        self.on_report = on_report
        self.on_module = on_module
        self._previous: Installation | None = None

    def reports(self) -> list[RewriteReport]:
        """The reports of all modules compiled so far, oldest first."""
        return self.log.all()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception) -> None:
        global _installed
        with _installed_lock:
            if _installed is self:
                _installed = self._previous


_installed: Installation | None = None
_installed_lock = threading.Lock()


def put_in_force(installation: Installation) -> None:
    """Let an installation replace the one in force, until it exits."""
    global _installed
    with _installed_lock:
        installation._previous, _installed = _installed, installation


def remove_installations() -> None:
    """Leave every jit that is not decorated to JAX again."""
    global _installed
    with _installed_lock:
        _installed = None


class _Here(threading.local):
    busy = False  # whether this thread is inside a rewrite


_here = _Here()


def ensure_seam() -> None:
    """Put the stage's hooks into JAX, once for the whole process."""
    for path in (__file__, stage_marks.__file__, _jax.__file__):
        _hidden_once(path)
    _jax.install_seam(_jax.SeamHooks(_lowered, stage_marks.copy_marks, _compile))


_hidden: set[str] = set()


def _hidden_once(path: str) -> None:
    if path not in _hidden:
        _hidden.add(path)
        _jax.hide_from_tracebacks(path)


def _lowered(lowering: Any, names: Iterator[str]) -> None:
    try:
        stage_marks.remember(lowering.stablehlo(), names)
    except Exception as error:
        _warn_once(
            f"a program can not be searched for functions: {describe_error(error)}"
        )


class CompileWatcher(Protocol):
    """Who is told of each compile, rewritten or not. Nothing it raises is caught."""

    def watch(
        self, compile_module: Callable[..., Any], module: ir.Module, devices: Any
    ) -> tuple[Callable[[Any], Any], Callable[[RewriteReport | None], None]]:
        """Called before the stage looks at a module.

        Returns:
            What compiles a module in place of `compile_module`, and what is called
            with the stage's report, None where it did nothing, after the compile.
        """
        ...


class _Watching(threading.local):
    watcher: CompileWatcher | None = None


_watching = _Watching()
_process_watcher: CompileWatcher | None = None


@contextlib.contextmanager
def watch_compiles(watcher: CompileWatcher, all_threads: bool) -> Iterator[None]:
    """Let a watcher see the compiles of this thread, or of all threads."""
    global _process_watcher
    ensure_seam()
    previous = _process_watcher, _watching.watcher
    if all_threads:
        _process_watcher = watcher
    else:
        _watching.watcher = watcher
    try:
        yield
    finally:
        _process_watcher, _watching.watcher = previous


def _compile(compile_module: Callable[..., Any], module: ir.Module, devices: Any):
    """What takes the place of a compile."""
    watcher = _watching.watcher or _process_watcher
    if watcher is None or _here.busy:
        return _compile_staged(compile_module, module, devices)
    compile_module, finish = watcher.watch(compile_module, module, devices)
    reports: list[RewriteReport] = []
    try:
        return _compile_staged(compile_module, module, devices, reports.append)
    finally:
        finish(reports[0] if reports else None)


def _compile_staged(
    compile_module: Callable[[Any], Any],
    module: ir.Module,
    devices: Any,
    tell: Callable[[RewriteReport], None] = lambda report: None,
) -> Any:
    """Compile a module, rewritten if somebody asked for that."""
    marks, installation = stage_marks.marks_of(module), _installed
    # A rewrite that runs code to check itself must not be rewritten in turn.
    if not (marks or installation) or _here.busy or is_off():
        return compile_module(module)
    config = marks[0].config if marks else installation and installation.config
    assert config is not None
    asked, config = config, config.with_environment(os.environ)
    rewritten, report = _rewrite(module, devices, config)
    report.notes += _conflicts(marks)
    if asked != config:
        report.notes.append(f"the environment asks for {config}")
    _show_module(module, rewritten, config, report, installation)
    try:
        return _compile_or_fall_back(compile_module, module, rewritten, report)
    finally:
        _deliver(report, marks, installation)
        tell(report)


def _rewrite(
    module: ir.Module, devices: Any, config: StageConfig
) -> tuple[ir.Module, RewriteReport]:
    kind = "unknown"
    _here.busy = True
    try:
        from hlo_tools import driver
        from hlo_tools.targets import Target

        flat = np.asarray(devices).ravel().tolist()
        kind = flat[0].device_kind
        with _neutral_settings():
            return driver.transform(module, Target.from_devices(flat), config)
    except Exception as error:
        why = describe_error(error)
        if isinstance(error, PassSpecError | UnknownNameError):
            spec = os.environ.get("HLO_TOOLS_PASSES")
            why = f"HLO_TOOLS_PASSES={spec}: {error}" if spec == config.passes else why
        note = f"the stage failed, and {AS_WRITTEN}: {why}"
        _warn_once(f"{module_name(module)}: {note}")
        report = RewriteReport(module_name(module), kind, notes=[note])
        return module, report
    finally:
        _here.busy = False


def _show_module(
    module: ir.Module,
    rewritten: ir.Module,
    config: StageConfig,
    report: RewriteReport,
    installation: Installation | None,
) -> None:
    """Hand a module to who asked to see them all."""
    if installation is None or installation.on_module is None:
        return
    try:
        text = str(module.operation.get_asm(enable_debug_info=True))
        changed = rewritten is not module
        installation.on_module(StagedModule(text, changed, config, report))
    except Exception as error:
        why = describe_error(error)
        _warn_once(f"the callback given as install(modules=...) failed: {why}")


AS_WRITTEN = "the program was compiled as it was written"


def _compile_or_fall_back(
    compile_module: Callable[[Any], Any],
    module: ir.Module,
    rewritten: ir.Module,
    report: RewriteReport,
) -> Any:
    if rewritten is module:
        return compile_module(module)
    try:
        return compile_module(rewritten)
    except Exception as error:
        why = describe_error(error)
        reason = f"XLA refused the rewritten program, and {AS_WRITTEN}: {why}"
    # Outside of the handler: if this fails too, the user's own error stands alone.
    report.notes.append(reason)
    for site in report.with_status("bound"):
        site.status, site.implementation, site.reason = "failed", None, reason
    _warn_once(f"{module_name(module)}: {reason}")
    return compile_module(module)


@contextlib.contextmanager
def _neutral_settings() -> Iterator[None]:
    """JAX settings under which kernels are lowered and checks are run.

    A compile happens under whatever the user has set for the program's own sake,
    perhaps in the middle of a trace. None of it is meant for the stage's code.
    """
    with contextlib.ExitStack() as stack:
        for manager in (
            # not jax.ensure_compile_time_eval, which folds constants into Pallas'
            # index maps
            _jax.outside_any_trace(),
            jax.disable_jit(False),
            jax.default_matmul_precision(None),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            jax.transfer_guard("allow"),
            jax.debug_nans(False),
            jax.debug_infs(False),
            jax.check_tracer_leaks(False),
        ):
            stack.enter_context(manager)
        # Refused inside the body of a shard_map; there is no mesh to leave there.
        with contextlib.suppress(ValueError):
            stack.enter_context(jax.set_mesh(None))
        yield


def _conflicts(marks: Sequence[Mark]) -> list[str]:
    return [
        f"{mark.function} asks for {mark.config}, but is compiled as a part of "
        f"{marks[0].function}, whose settings hold: {marks[0].config}"
        for mark in marks[1:]
        if mark.config != marks[0].config
    ]


def _deliver(
    report: RewriteReport, marks: Sequence[Mark], installation: Installation | None
) -> None:
    logs = [mark.log for mark in marks]
    if installation is not None:
        logs.append(installation.log)
    for log in logs:
        log.append(report)
    if installation is None or installation.on_report is None:
        return
    try:
        installation.on_report(report)
    except Exception as error:
        _warn_once(
            f"the callback given as install(report=...) failed: {describe_error(error)}"
        )


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"hlo_tools: {message}", RuntimeWarning, stacklevel=2)


def module_name(module: ir.Module) -> str:
    """The name of a module, such as "jit_train_step"."""
    return ir.StringAttr(module.operation.attributes["sym_name"]).value
