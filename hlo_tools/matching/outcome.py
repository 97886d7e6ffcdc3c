"""What a matcher says when it does not match."""

from __future__ import annotations

from typing import Any


class NoMatchError(Exception):
    """A candidate is not the pattern.

    Attributes:
      reason: one sentence.
      near: True if a person would call the program an instance of the pattern
        all the same, so that the report shows it.
      value: the first MLIR value (or operation) that differs, or None.
      got: what stands there.
      expected: what the pattern wants there.
      edit: the smallest change of the user's program that would match.
    """

    def __init__(
        self,
        reason: str,
        *,
        near: bool = False,
        value: Any = None,
        got: str = "",
        expected: str = "",
        edit: str = "",
    ):
        super().__init__(reason)
        self.reason, self.near, self.value = reason, near, value
        self.got, self.expected, self.edit = got, expected, edit
