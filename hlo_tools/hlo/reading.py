"""`parse`: whatever holds a module to an `HloModule`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hlo_tools.errors import HloToolsError
from hlo_tools.hlo.ir import HloModule
from hlo_tools.hlo.parser import parse_text
from hlo_tools.hlo.proto import proto_text

_BYTECODE = b"ML\xefR"
_MLIR = re.compile(
    r"\s*(?://[^\n]*\n\s*)*(?:#\w+\s*=|!\w+\s*=|module\b[^\n]*\{|\"builtin\.module\"|"
    r"func\.func\b)"
)
_MLIR_OPERATION = re.compile(r"\b(?:func\.func|stablehlo\.|sdy\.|mhlo\.)")
# Of a dump folder, in the order of what to take when one module is asked for.
_SUFFIXES = (".txt", ".hlo", ".mlir", ".hlo.pb", ".pb", ".hlo_proto")
_STAGE = re.compile(
    r"(?:module_(?P<number>\d+)\.)?(?P<name>.+?)\."
    r"(?P<stage>before_optimizations|(?:\w+_)?after_optimizations)$"
)


def parse(source: Any, filename: str = "") -> HloModule:
    """Reads a module.

    Args:
        source: HLO or StableHLO text, a serialized HLO proto or MLIR bytecode, the path
            of a file with one of these or of a dump folder with one module in it, a
            `StableHloModule`, or what `jax.jit(f).lower(...)` or its `compile()`
            returns.
        filename: for messages, where `source` is no path.

    Returns:
        The module. Of a dump folder, the one after optimization.

    Raises:
        HloToolsError: there is no module in it, or more than one.
    """
    if isinstance(source, HloModule):
        return source
    if isinstance(source, Path) or (isinstance(source, str) and _is_path(source)):
        return _parse_path(Path(source))
    if isinstance(source, bytes | bytearray):
        return _parse_bytes(bytes(source), filename)
    if isinstance(source, str):
        return _parse_string(source, filename)
    return _parse_object(source, filename)


def parse_folder(folder: str | Path) -> dict[tuple[str, str], HloModule]:
    """Reads the modules that `--xla_dump_to` left in a folder.

    Returns:
        For each (function, stage) its module; stage is "before_optimizations" or
        "after_optimizations". A second module of the same name is "name#2".

    Raises:
        HloToolsError: there is none in it.
    """
    found: dict[tuple[str, str], HloModule] = {}
    for path, name, stage in dumped(folder):
        key, number = (name, stage), 1
        while key in found:
            number += 1
            key = (f"{name}#{number}", stage)
        found[key] = _parse_path(path)
    return found


def dumped(folder: str | Path) -> list[tuple[Path, str, str]]:
    """(file, function, stage) of each module in a dump folder, by module number.

    Raises:
        HloToolsError: there is none in it.
    """
    rows = []
    seen = set()
    for suffix in _SUFFIXES:
        for path in sorted(Path(folder).glob(f"*{suffix}")):
            match = _STAGE.fullmatch(path.name.removesuffix(suffix))
            if match is None or match[0] in seen:
                continue
            seen.add(match[0])
            stage = match["stage"]
            stage = stage[stage.index("after") :] if "after" in stage else stage
            rows.append((int(match["number"] or 0), path, match["name"], stage))
    if not rows:
        raise HloToolsError(
            f"{folder}: no modules in this folder; expected files as --xla_dump_to "
            "writes them, module_0001.jit_f.before_optimizations.txt"
        )
    rows.sort()
    return [row[1:] for row in rows]


# How the text of a module begins, which may be cut within its first line.
_TEXT = re.compile(r"\s*(HloModule|ENTRY|module|%|//|/\*)")


def _is_path(text: str) -> bool:
    if "\n" in text or len(text) > 4096 or not text.strip():
        return False
    try:
        if Path(text).exists():
            return True
        return not _TEXT.match(text) and not re.search(r"[{(=]", text)
    except (OSError, ValueError):
        return False


def _parse_path(path: Path) -> HloModule:
    try:
        if path.is_dir():
            return _parse_only_module(path)
        return _parse_bytes(path.read_bytes(), str(path))
    except OSError as error:
        raise HloToolsError(f"{path}: {error.strerror or error}") from error


def _parse_only_module(folder: Path) -> HloModule:
    rows = dumped(folder)
    after = [row for row in rows if row[2] == "after_optimizations"] or rows
    if len(after) > 1:
        names = ", ".join(path.name for path, _, _ in after[:5])
        raise HloToolsError(
            f"{folder}: {len(after)} modules in this folder, expected one; name one of "
            f"the files: {names}"
        )
    return _parse_path(after[0][0])


def _parse_bytes(data: bytes, filename: str) -> HloModule:
    if data.startswith(_BYTECODE):
        return _parse_stablehlo(data, filename)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = None
    # A proto can be valid UTF-8; its first byte is the tag of its name.
    if text is None or (data[:1] == b"\n" and "\x00" in text):
        return parse_text(proto_text(data, filename or "<proto>"), filename)
    return _parse_string(text, filename)


def _parse_string(text: str, filename: str) -> HloModule:
    if _MLIR.match(text) and _MLIR_OPERATION.search(text):
        return _parse_stablehlo(text, filename)
    return parse_text(text, filename)


def _parse_stablehlo(data: str | bytes, filename: str) -> HloModule:
    from hlo_tools.hlo.from_stablehlo import from_stablehlo
    from hlo_tools.module import StableHloModule

    module = StableHloModule.parse(data, filename=filename or "<string>")
    return from_stablehlo(module, filename)


def _parse_object(source: Any, filename: str) -> HloModule:
    from hlo_tools.module import StableHloModule

    if isinstance(source, StableHloModule):
        from hlo_tools.hlo.from_stablehlo import from_stablehlo

        return from_stablehlo(source, filename)
    if hasattr(source, "compiler_ir"):  # lowered
        return _parse_string(source.as_text(debug_info=True), filename)
    if hasattr(source, "as_text"):  # compiled
        return _parse_string(source.as_text(), filename)
    if type(source).__name__ == "Module" and hasattr(source, "operation"):  # MLIR
        return _parse_object(StableHloModule(source), filename)
    raise HloToolsError(
        f"a module can not be read from a {type(source).__name__}; expected text, "
        "bytes, a path, or what jax.jit(f).lower(...) returns"
    )
