"""Keeping every form a program takes on its way through the stage and XLA.

XLA's dump options are added to each compile alone, so no environment variable is
needed and the program sees nothing of it. Each compile has one number, which all of
its files begin with: module_0001.jit_f.before_optimizations.txt and so on.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.extend.mlir import ir

from hlo_tools import stage_compile
from hlo_tools.errors import HloToolsError, describe_error
from hlo_tools.hlo.dump_reading import DumpEntry, classify, read_dump
from hlo_tools.report import RewriteReport

_XLA_FILE = re.compile(r"(?:\d{6,}\.)?module_\d+\.(?P<rest>.+)")
_KEPT = ("before_optimizations", "after_optimizations", "buffer_assignment")
_NAMES = {"buffer_assignment": "after_optimizations-buffer-assignment"}
_MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def dump(stage: Any, folder: str | Path, passes: str | None = None) -> DumpEntry:
    """Keeps what `jax.jit(f).lower(...)` or its `compile()` holds.

    Args:
        stage: a lowered function, which is compiled anew for this, or a compiled one,
            of which only the module after optimization is left.
        folder: where it goes; made if it is not there, added to if it is.
        passes: regular expression; the module is kept after each XLA pass whose name
            it is found in.

    Returns:
        What was written.

    Raises:
        HloToolsError: `stage` is neither, or the folder can not be written.
    """
    dumper = Dumper(folder, passes)
    if hasattr(stage, "compile") and hasattr(stage, "compiler_ir"):
        with stage_compile.watch_compiles(dumper, all_threads=False):
            # any option makes JAX compile again what it has compiled already
            stage.compile({"xla_embed_ir_in_executable": False})
    elif hasattr(stage, "runtime_executable"):
        dumper.add_executable(stage.runtime_executable())
    else:
        raise HloToolsError(
            f"dump takes what jax.jit(f).lower(...) or its compile() returns; "
            f"got a {type(stage).__name__}"
        )
    dumper.finish()
    number = dumper.records[-1].number
    return next(e for e in read_dump(folder) if e.number == number)


@dataclass
class _Record:
    """One compile, as it goes into the index."""

    number: int
    name: str
    device: str = ""
    stage: str = "not treated"  # or "unchanged", "rewritten", "refused by XLA"
    error: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    passes: list[str] = field(default_factory=list)
    flops: float | None = None
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        return f"module_{self.number:04d}.{self.name}"


class Dumper:
    """Keeps the compiles that it is told of; a `stage_compile.CompileWatcher`.

    Args:
        folder: where they go.
        passes: regular expression for XLA passes, None for none.
        only: regular expression for module names, None for all.

    Attributes:
        records: of the compiles so far.

    Raises:
        HloToolsError: the folder can not be made, or an expression is none.
    """

    def __init__(
        self, folder: str | Path, passes: str | None = None, only: str | None = None
    ):
        self.folder, self.passes = Path(folder).absolute(), passes
        try:
            self._only = re.compile(only or "")
            re.compile(passes or "")
            self.folder.mkdir(parents=True, exist_ok=True)
        except re.error as error:
            raise HloToolsError(f"{error.pattern!r}: {error}") from error
        except OSError as error:
            raise HloToolsError(f"{folder}: {error.strerror or error}") from error
        self.records: list[_Record] = []
        self._lock = threading.Lock()
        self._next = 1 + max(_numbers(self.folder), default=0)

    def watch(
        self, compile_module: Callable[..., Any], module: ir.Module, devices: Any
    ) -> tuple[Callable[[Any], Any], Callable[[RewriteReport | None], None]]:
        """See `stage_compile.CompileWatcher`."""
        name = stage_compile.module_name(module)
        if not self._only.search(name):
            return compile_module, lambda report: None
        record = self._new_record(name, str(devices.flat[0].device_kind))
        with self._no_failure(record):
            self._write(record, "stablehlo_before_stage", ".mlir", _text(module))

        def compile_and_keep(given: ir.Module) -> Any:
            if given is not module:
                record.stage = "rewritten"
                with self._no_failure(record):
                    self._write(record, "stablehlo_after_stage", ".mlir", _text(given))
            elif record.stage == "rewritten":
                record.stage = "refused by XLA"
            try:
                executable = compile_module(given, self._options(record))
            except Exception as error:
                record.error = describe_error(error)
                raise
            else:
                record.error = None
                with self._no_failure(record):
                    self._keep_executable(record, executable)
                return executable
            finally:
                with self._no_failure(record):
                    self._gather(record)

        def finish(report: RewriteReport | None) -> None:
            with self._no_failure(record):
                if report is not None:
                    if record.stage == "not treated":
                        record.stage = "unchanged"
                    self._write(record, "report", ".json", report.to_json())
                self._write_index()

        return compile_and_keep, finish

    def add_executable(self, executable: Any) -> None:
        """Keep what is left in an executable of how it was made."""
        module = executable.hlo_modules()[0]
        record = self._new_record(module.name, "")
        self._keep_executable(record, executable)

    def finish(self) -> None:
        """Write the index and its page."""
        from hlo_tools.dump_page import index_page

        self._write_index()
        rows = [vars(record) for record in self.records]
        page = index_page(rows)
        (self.folder / "index.html").write_text(page, encoding="utf-8")

    def _new_record(self, name: str, device: str) -> _Record:
        with self._lock:
            record = _Record(self._next, re.sub(r"[^\w.-]", "_", name), device)
            self._next += 1
            self.records.append(record)
            return record

    def _options(self, record: _Record) -> dict[str, Any]:
        options = {"xla_dump_to": str(self.folder / record.stem)}
        if self.passes is not None:
            options["xla_dump_hlo_pass_re"] = self.passes
        return options

    def _write(self, record: _Record, kind: str, suffix: str, text: str) -> None:
        name = f"{record.stem}.{_NAMES.get(kind, kind)}{suffix}"
        (self.folder / name).write_text(text, encoding="utf-8")
        record.files[kind] = name

    def _keep_executable(self, record: _Record, executable: Any) -> None:
        modules = executable.hlo_modules()
        text = "\n".join(module.to_string() for module in modules)
        self._write(record, "after_optimizations", ".txt", text)
        with contextlib.suppress(Exception):  # not every backend has it
            costs = executable.cost_analysis()
            costs = costs[0] if isinstance(costs, list) else costs
            record.flops = float(costs["flops"])
        with contextlib.suppress(Exception):
            stats = executable.get_compiled_memory_stats()
            record.memory = {k: getattr(stats, f"{k}_size_in_bytes") for k in _MEMORY}

    def _gather(self, record: _Record) -> None:
        """Give the files that XLA wrote the names that go with this compile."""
        inside = self.folder / record.stem
        record.passes.clear()
        for path in sorted(inside.glob("*")):
            found = _XLA_FILE.fullmatch(path.name)
            kind = classify(found["rest"])[0] if found else ""
            if kind == "pass":
                record.passes.append((path.relative_to(self.folder)).as_posix())
            elif kind in _KEPT and path.suffix == ".txt":
                if kind == "after_optimizations" and kind in record.files:
                    path.unlink()  # the executable's own text is kept
                    continue
                name = f"{record.stem}.{_NAMES.get(kind, kind)}.txt"
                shutil.move(path, self.folder / name)
                record.files[kind] = name

    def _write_index(self) -> None:
        with self._lock:
            rows = [vars(record) for record in self.records]
            text = json.dumps({"schema": 1, "modules": rows}, indent=1, default=str)
            part = self.folder / "index.json.part"
            part.write_text(text, encoding="utf-8")
            part.replace(self.folder / "index.json")

    @contextlib.contextmanager
    def _no_failure(self, record: _Record) -> Iterator[None]:
        """The program goes on when its dump can not be written."""
        try:
            yield
        except Exception as error:
            message = (
                f"hlo_tools: {record.stem} is not all kept: {describe_error(error)}"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def _text(module: ir.Module) -> str:
    return str(module.operation.get_asm(enable_debug_info=True))


def _numbers(folder: Path) -> Iterator[int]:
    for path in folder.glob("module_*"):
        if found := re.match(r"module_(\d+)\.", path.name):
            yield int(found[1])
