"""`jit`, `install` and `uninstall`: `jax.jit` with one more compiler stage.

The stage runs where JAX hands a lowered program to XLA. Everything before and after
that is JAX's own: tracing, caches, dispatch, sharding, ahead-of-time use.

Environment: `HLO_TOOLS=off` (or `0`, `false`, `no`) turns all of it into plain
`jax.jit`. It is read when something is decorated or installed, and at every compile.
At every compile, `HLO_TOOLS_PASSES=SPEC` replaces the pipeline that was asked for,
and `HLO_TOOLS_SKIP_SITES` and `HLO_TOOLS_ONLY_SITES` (ids as in the report, joined by
"+") say which sites are not, or alone, bound.

A function keeps the program that it was compiled to. After `install`, `uninstall`
or a change of `HLO_TOOLS`, functions compiled before run as they did until JAX
compiles them anew, which `jax.clear_caches()` brings about.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jaxlib.version

from hlo_tools import _jax, stage_compile, stage_marks
from hlo_tools.report import RewriteReport
from hlo_tools.stage_compile import Installation, StagedModule, is_off

if TYPE_CHECKING:
    from hlo_tools.driver import StageConfig

__all__ = [
    "Installation",
    "StageConfig",
    "StagedModule",
    "install",
    "is_off",
    "jit",
    "uninstall",
]

_problem = _jax.seam_problem()
if _problem is not None:
    warnings.warn(
        "hlo_tools: the stage does not work with this JAX, so hlo_tools.jit is plain "
        f"jax.jit: {_problem}",
        RuntimeWarning,
        stacklevel=2,
    )


def __getattr__(name: str) -> Any:
    if name == "StageConfig":  # on demand: a JAX without the seam may lack its needs
        from hlo_tools.driver import StageConfig

        return StageConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_NO_FUNCTION: Any = object()


def jit(
    fun: Callable = _NO_FUNCTION,
    /,
    *,
    passes: str = "default",
    exactness: str = "reassociating",
    verify: bool = False,
    **jax_jit_kwargs: Any,
) -> Any:
    """`jax.jit` whose programs go through a pass pipeline before XLA.

    Used as `jax.jit` is: `@hlo_tools.jit`, `@hlo_tools.jit(static_argnums=0)` or
    `hlo_tools.jit(fun)`. The result is the object that `jax.jit` returns, with two
    methods added: `.report()` is the `RewriteReport` of the latest compile, and
    `.reports()` those of all compiles.

    Called inside another jit, the whole program of that jit is treated. If several
    decorated functions end up in one program, the settings of the outermost or
    first called one hold, and the report says so. With `inline=True` the call
    leaves no trace in an enclosing program, so that one is not treated.

    Args:
        fun: the function. When omitted, a decorator is returned.
        passes: the pipeline, as "normalize,outline-attention,bind-kernels".
        exactness: the loosest rewrite allowed: "bitwise", "reassociating" (sums in
            another order) or "approximate".
        verify: check each bound site on random inputs on the device at hand, and
            undo it alone if it is wrong.
        jax_jit_kwargs: as for `jax.jit`.

    Raises:
        PassSpecError, UnknownNameError: `passes` or `exactness` is bad.
    """
    stage_options = {"passes": passes, "exactness": exactness, "verify": verify}
    if fun is _NO_FUNCTION:
        jax.jit(**jax_jit_kwargs)  # a misspelled keyword fails here, as in JAX
        _check_options(**stage_options)
        return functools.partial(jit, **stage_options, **jax_jit_kwargs)
    config = _check_options(**stage_options)
    if config is None or not _is_jittable(fun):
        jitted = jax.jit(fun, **jax_jit_kwargs)  # says what is wrong with `fun`
        return _with_reports(jitted, fun, None)
    stand_in = stand_in_for(fun, config)
    jitted = jax.jit(stand_in, **jax_jit_kwargs)
    _jax.keep_alive(jitted, fun)
    _describe_as(jitted, fun)
    return _with_reports(jitted, fun, stand_in.mark)


def install(
    *,
    passes: str = "default",
    exactness: str = "reassociating",
    verify: bool = False,
    report: Callable[[RewriteReport], None] | None = None,
    modules: Callable[[StagedModule], None] | None = None,
) -> Installation:
    """Treat every jit of the process from now on, decorated or not.

    Decorated functions keep their own settings. A second call replaces the settings
    of the first; `uninstall` ends all of them. As a context manager it is in force
    in the body only, and what was before is restored after it. Functions that were
    compiled before keep their program (see `jax.clear_caches`).

    Args:
        passes: as for `jit`.
        exactness: as for `jit`.
        verify: as for `jit`.
        report: called with the report of each compile, in the thread that compiles.
        modules: the same, with the module and what became of it, before its compile.

    Returns:
        A handle; its `reports()` are those of all compiles under it.

    Raises:
        PassSpecError, UnknownNameError: `passes` or `exactness` is bad.
    """
    config = _check_options(passes=passes, exactness=exactness, verify=verify)
    installation = Installation(config, report, modules)
    if config is not None:
        stage_compile.ensure_seam()
        stage_compile.put_in_force(installation)
    return installation


def uninstall() -> None:
    """End all `install`s. Functions compiled before keep their program."""
    stage_compile.remove_installations()


def _check_options(*, passes: str, exactness: str, verify: bool) -> StageConfig | None:
    """The options as a config, or None where the stage is not to be used."""
    if _problem is not None or is_off():
        return None
    from hlo_tools.driver import StageConfig
    from hlo_tools.errors import UnknownNameError
    from hlo_tools.pipeline import EXACTNESS, PassPipeline

    if exactness not in EXACTNESS:
        raise UnknownNameError("exactness", exactness, EXACTNESS)
    PassPipeline.parse(passes)
    return StageConfig(passes, exactness, bool(verify))


def stand_in_for(fun: Callable, config: StageConfig) -> Any:
    """What to give to `jax.jit` for `fun`; `fun` itself where the stage is off."""
    if _problem is not None or is_off():
        return fun
    stage_compile.ensure_seam()
    return stage_marks.marked(fun, config)


def _is_jittable(fun: Any) -> bool:
    """Whether `jax.jit` takes `fun`; what it refuses is handed to it as it is."""
    if not callable(fun) or inspect.isgeneratorfunction(fun):
        return False
    try:
        weakref.ref(fun)
    except TypeError:
        return False
    return not isinstance(fun, staticmethod)


def _describe_as(jitted: Any, fun: Callable) -> None:
    """Give a jitted stand-in the attributes that `jax.jit(fun)` would have."""
    name = _jax.fun_name(fun)
    for key, value in getattr(fun, "__dict__", {}).items():
        jitted.__dict__.setdefault(key, value)
    jitted.__annotations__ = getattr(fun, "__annotations__", {})
    jitted.__name__ = name
    jitted.__module__ = getattr(fun, "__module__", "<unknown module>")
    jitted.__doc__ = getattr(fun, "__doc__", "") or ""
    jitted.__qualname__ = getattr(fun, "__qualname__", name)
    jitted.__wrapped__ = fun


class _Reports:
    """`report` and `reports` of a jitted function."""

    def __init__(self, fun: Callable, mark: stage_marks.Mark | None):
        self.fun, self.mark = fun, mark

    def report(self) -> RewriteReport:
        """The report of the latest compile; one that says why if there is none."""
        reports = self.reports()
        if reports:
            return reports[-1]
        versions = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}
        name = f"jit_{_jax.fun_name(self.fun)}"
        return RewriteReport(name, versions=versions, notes=[self._why_none()])

    def reports(self) -> list[RewriteReport]:
        """The reports of all compiles, oldest first."""
        return [] if self.mark is None else self.mark.log.all()

    def _why_none(self) -> str:
        if _problem is not None:
            return f"plain jax.jit: the stage does not work with this JAX: {_problem}"
        if self.mark is None or is_off():
            return "plain jax.jit: HLO_TOOLS switches the stage off"
        return "not compiled yet: call the function, or .lower(...).compile() it"


def _with_reports(jitted: Any, fun: Callable, mark: stage_marks.Mark | None) -> Any:
    reports = _Reports(fun, mark)
    jitted.report, jitted.reports = reports.report, reports.reports
    return jitted
