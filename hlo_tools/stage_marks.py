"""How a program is recognized as one that the stage is to treat.

A decorated function carries its mark in its name: a string like any other, except
that it knows what is to be done. JAX hands that name on with the inner jit through
`vmap`, `grad`, `scan`, `shard_map` and all other transformations, and drops it with
the call when the call is dead. So nothing is added to the program: no operation, no
effect, no argument, no text. When a module is lowered, the names in it are looked
at once, and the marks found are kept beside the module for its compile.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hlo_tools import _jax
from hlo_tools.report import RewriteReport

if TYPE_CHECKING:
    from hlo_tools.driver import StageConfig


class ReportLog:
    """The reports of one function's compiles, oldest first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: list[RewriteReport] = []

    def append(self, report: RewriteReport) -> None:
        with self._lock:
            self._reports.append(report)

    def all(self) -> list[RewriteReport]:
        with self._lock:
            return list(self._reports)

    def __reduce__(self):  # a pickled function starts with no reports
        return ReportLog, ()


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
    """What a decorated function asks for.

    Attributes:
        function: its name, for messages.
        config: what is to be done with the modules it is part of.
        log: where their reports go.
    """

    function: str
    config: StageConfig
    log: ReportLog = dataclasses.field(default_factory=ReportLog)


class MarkedName(str):
    """A function's name that carries a `Mark`; equal to the plain string."""

    mark: Mark

    def __new__(cls, name: str, mark: Mark) -> MarkedName:
        self = super().__new__(cls, name)
        self.mark = mark
        return self

    def __reduce__(self):
        return MarkedName, (str(self), self.mark)


class MarkedFunction:
    """Stands in for a user's function in `jax.jit`, under a `MarkedName`.

    It is equal to another stand-in of an equal function with an equal config, as
    JAX's trace cache is keyed by that. It refers to the function weakly, so that
    the table of stand-ins keeps no function alive; what `jax.jit` returned for it
    does (`_jax.keep_alive`).
    """

    __slots__ = ("__name__", "__weakref__", "_function", "_hash", "mark")

    def __init__(self, function: Callable, mark: Mark):
        self._function: Callable[[], Any] = weakref.ref(function)
        try:
            self._hash: int | None = hash(function)
        except TypeError:
            self._hash = None
        self.mark = mark
        self.__name__ = MarkedName(_jax.fun_name(function), mark)

    def __call__(self, *args, **kwargs):
        return self._function()(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable:
        return self._function()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MarkedFunction):
            return NotImplemented
        if self.mark.config != other.mark.config:
            return False
        return bool(self._function() == other._function())

    def __hash__(self) -> int:
        return hash(self._function()) if self._hash is None else self._hash

    def __repr__(self) -> str:
        return repr(self._function())

    def __reduce__(self):
        from hlo_tools.stage import stand_in_for  # it knows whether to use the stage

        return stand_in_for, (self._function(), self.mark.config)


# id of a function -> (the function, weakly; config -> stand-in). One stand-in for
# each function and config, for `jax.jit(f)` in a loop compiles `f` once.
_stand_ins: dict[int, tuple[weakref.ref, dict[StageConfig, MarkedFunction]]] = {}
_stand_ins_lock = threading.RLock()  # a weak reference may die while it is held


def marked(function: Callable, config: StageConfig) -> MarkedFunction:
    """The stand-in for a function under a config; the same one every time.

    Raises:
        TypeError: the function can not be referred to weakly, as JAX requires.
    """
    key = id(function)

    def forget(dead: weakref.ref) -> None:
        with _stand_ins_lock:
            found = _stand_ins.get(key)
            if found is not None and found[0] is dead:
                del _stand_ins[key]

    with _stand_ins_lock:
        found = _stand_ins.get(key)
        if found is None or found[0]() is not function:
            found = _stand_ins[key] = (weakref.ref(function, forget), {})
        by_config = found[1]
        if config not in by_config:
            mark = Mark(_jax.fun_name(function), config)
            by_config[config] = MarkedFunction(function, mark)
        return by_config[config]


# Modules compare by identity. JAX keeps a module for as long as it may compile it.
_marks: weakref.WeakKeyDictionary[Any, tuple[Mark, ...]] = weakref.WeakKeyDictionary()
_marks_lock = threading.RLock()


def remember(module: Any, names: Iterable[str]) -> None:
    """Note the marks among the names of the jits that went into a module."""
    found = [name.mark for name in names if isinstance(name, MarkedName)]
    if found:
        with _marks_lock:
            _marks[module] = tuple(dict.fromkeys(found))


def copy_marks(old: Any, new: Any) -> None:
    """Let a module that JAX made from a marked one be marked the same."""
    found = marks_of(old)
    if found and old is not new:
        with _marks_lock:
            _marks[new] = tuple(found)


def marks_of(module: Any) -> Sequence[Mark]:
    """The marks of a module's functions, outermost and first called first."""
    with _marks_lock:
        return _marks.get(module, ())
