"""Golden files of StableHLO text: a rewrite that changes is seen in a review."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from hlo_tools.errors import MlirParseError
from hlo_tools.module import StableHloModule

#: Environment variable that makes `assert_golden` write what it would compare with.
UPDATE_VARIABLE = "HLO_TOOLS_UPDATE_GOLDEN"


def normalized(text: str) -> str:
    """StableHLO text as MLIR prints it, without source locations.

    Names of values, spaces and the spelling of operations no longer matter. Text that
    is no MLIR comes back with its trailing spaces removed.
    """
    try:
        text = StableHloModule.parse(text).as_text()
    except MlirParseError:
        pass
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def assert_golden(
    text: str, path: str | os.PathLike[str], update: bool | None = None
) -> None:
    """Asserts that StableHLO text is what a golden file says.

    Args:
      text: MLIR, such as `hlo_tools.rewrite_text` returns.
      path: of the golden file.
      update: write the file instead. None: if the environment variable
        HLO_TOOLS_UPDATE_GOLDEN is set, and neither empty nor 0.

    Raises:
      AssertionError: there is no such file, or it differs; the message has the
        difference.
    """
    file, got = Path(path), normalized(text)
    if update is None:
        update = os.environ.get(UPDATE_VARIABLE, "") not in ("", "0")
    if update:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(got, encoding="utf-8")
        return
    how = f"set {UPDATE_VARIABLE}=1 to write it"
    if not file.is_file():
        raise AssertionError(f"no golden file {file}: {how}")
    want = normalized(file.read_text(encoding="utf-8"))
    if got == want:
        return
    lines = difflib.unified_diff(
        want.splitlines(), got.splitlines(), str(file), "now", lineterm=""
    )
    raise AssertionError("\n".join([f"{file} differs; {how}", *lines]))
