"""The only file that names JAX's private modules.

The stage needs two functions that JAX looks up by attribute whenever it uses them:

* `pxla.lower_sharding_computation` turns a jaxpr into a StableHLO module. Its
  wrapper sees which jitted functions went into the module, so that a module can be
  recognized without a trace of that in its text.
* `compiler.compile_or_get_cached` hands a module to XLA. It computes the key of the
  persistent cache from the module it is given, so a module replaced before that
  point can not be served another program's executable.

`seam_problem` says whether they are what this package knows; nothing is replaced
otherwise. Importing this file touches no backend and changes nothing.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.source_info_util

# Lowest version that works, and the first that is not known to.
MIN_JAX, BELOW_JAX = (0, 11, 2), (0, 13)

_COMPILE = "jax._src.compiler:compile_or_get_cached"
_BACKEND_COMPILE = "jax._src.compiler:backend_compile_and_load"
_LOWER = "jax._src.interpreters.pxla:lower_sharding_computation"
_REFINE = "jax._src.interpreters.mlir:refine_polymorphic_shapes"
_SUBJAXPRS = "jax._src.core:jaxprs_in_params"
_FUN_NAME = "jax._src.util:fun_name"
_EXCLUDE = "jax._src.traceback_util:register_exclusion"
_EVAL = "jax._src.core:eval_context"
_CACHE_MISS = "_cache_miss"  # of a jitted function: what it calls to trace

# What is relied on: its first parameters, in order.
_EXPECTED: dict[str, tuple[str, ...]] = {
    _COMPILE: (
        "backend",
        "computation",
        "devices",
        "compile_options",
        "host_callbacks",
        "executable_devices",
    ),
    _BACKEND_COMPILE: (
        "backend",
        "module",
        "executable_devices",
        "options",
        "host_callbacks",
    ),
    _LOWER: ("closed_jaxpr", "api_name", "fun_name"),
    _REFINE: ("module",),
    _SUBJAXPRS: ("params",),
    _FUN_NAME: ("fun",),
    _EXCLUDE: ("path",),
    _EVAL: (),
}


class SeamHooks(NamedTuple):
    """What the stage wants to be told. None of them may raise on its own account.

    Attributes:
        lowered: (lowering, names) after a lowering; `lowering.stablehlo()` is the
            module, `names` are the function names of the jit itself and of every
            jit inside it, in program order.
        refined: (old, new) when a module of symbolic shapes becomes one of static
            shapes.
        compile: (compile, module, devices) in place of a compile; returns what
            `compile(module)` returns. `compile(module, options)` adds XLA options,
            name -> value, and goes past the persistent cache, which is keyed by few
            of them.
    """

    lowered: Callable[[Any, Iterator[str]], None]
    refined: Callable[[Any, Any], None]
    compile: Callable[[Callable[[Any], Any], Any, Any], Any]


def seam_problem() -> str | None:
    """Why the stage can not work with the JAX at hand, or None if it can."""
    version = tuple(jax.__version_info__)
    if not MIN_JAX <= version < BELOW_JAX:
        lowest, below = (".".join(map(str, v)) for v in (MIN_JAX, BELOW_JAX))
        return f"it needs jax >={lowest},<{below} and finds {jax.__version__}"
    for place, expected in _EXPECTED.items():
        try:
            function = _get(place)
            parameters = inspect.signature(function).parameters.values()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            return f"jax {jax.__version__} lacks {place.replace(':', '.')} ({error})"
        # A wrapper that someone else put there passes everything on as *args.
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            continue
        found = tuple(p.name for p in parameters)[: len(expected)]
        if found != expected:
            return (
                f"{place.replace(':', '.')} of jax {jax.__version__} takes "
                f"{', '.join(found)}; expected {', '.join(expected)}"
            )
    if not hasattr(jax.jit(seam_problem), _CACHE_MISS):
        return f"what jax.jit of jax {jax.__version__} returns has no {_CACHE_MISS}"
    return None


_install_lock = threading.Lock()
_hooks: SeamHooks | None = None


def install_seam(hooks: SeamHooks) -> None:
    """Route lowering and compiling through `hooks`; once for the whole process.

    Raises:
        AttributeError, ImportError: `seam_problem` would have said so.
    """
    global _hooks
    with _install_lock:
        if _hooks is not None:
            return
        _replace(_LOWER, _wrap_lower)
        _replace(_REFINE, _wrap_refine)
        _replace(_COMPILE, _wrap_compile)
        _hooks = hooks


def _replace(place: str, wrap: Callable[[Callable], Callable]) -> None:
    module, _, name = place.partition(":")
    original = _get(place)
    replacement = functools.wraps(original)(wrap(original))
    setattr(importlib.import_module(module), name, replacement)


def _wrap_lower(original: Callable) -> Callable:
    def lower(closed_jaxpr, api_name, fun_name, *args, **kwargs):
        lowering = original(closed_jaxpr, api_name, fun_name, *args, **kwargs)
        if _hooks is not None:
            names = itertools.chain([fun_name], nested_jit_names(closed_jaxpr))
            _hooks.lowered(lowering, names)
        return lowering

    return lower


def _wrap_refine(original: Callable) -> Callable:
    def refine(module):
        refined = original(module)
        if _hooks is not None:
            _hooks.refined(module, refined)
        return refined

    return refine


def _wrap_compile(original: Callable) -> Callable:
    def compile_or_get_cached(backend, computation, devices, *args, **kwargs):
        def compile_module(module, options=None):
            if options:
                given = inspect.signature(original).bind(
                    backend, module, devices, *args, **kwargs
                )
                return _compile_with(options, **given.arguments)
            return original(backend, module, devices, *args, **kwargs)

        if _hooks is None:
            return compile_module(computation)
        return _hooks.compile(compile_module, computation, devices)

    return compile_or_get_cached


def _compile_with(
    xla_options: Mapping[str, Any],
    *,
    backend: Any,
    computation: Any,
    compile_options: Any,
    host_callbacks: Any,
    executable_devices: Any,
    **_: Any,
) -> Any:
    """Compile with more XLA options, and do not ask the persistent cache."""
    before = list(compile_options.env_option_overrides)
    compile_options.env_option_overrides = [*before, *xla_options.items()]
    try:
        return _get(_BACKEND_COMPILE)(
            backend, computation, executable_devices, compile_options, host_callbacks
        )
    finally:
        compile_options.env_option_overrides = before


def nested_jit_names(jaxpr: Any) -> Iterator[str]:
    """The `name` parameters in a jaxpr and all jaxprs inside it, in program order.

    Each inner jaxpr is looked at once, however often it is called.
    """
    seen = {id(jaxpr)}

    def visit(inner: Any) -> Iterator[str]:
        subjaxprs = _get(_SUBJAXPRS)
        for eqn in inner.eqns:
            if not eqn.params:
                continue
            name = eqn.params.get("name")
            if isinstance(name, str):
                yield name
            for below in subjaxprs(eqn.params):
                if id(below) not in seen:
                    seen.add(id(below))
                    yield from visit(below)

    return visit(jaxpr)


def fun_name(fun: Callable) -> str:
    """The name under which `jax.jit(fun)` shows up in profiles and modules."""
    return _get(_FUN_NAME)(fun)


def keep_alive(jitted: Any, referent: Any) -> None:
    """Have a jitted function, and every copy of it, keep an object alive."""
    # Attributes of the jitted function itself are lost in a copy or a pickle.
    getattr(jitted, _CACHE_MISS).__dict__["_hlo_tools_referent"] = referent


def outside_any_trace() -> contextlib.AbstractContextManager[None]:
    """Leaves the trace in progress, if any, for the body of a `with`."""
    return _get(_EVAL)()


def hide_from_tracebacks(path: str) -> None:
    """Have JAX treat a file as its own, in tracebacks and in source locations."""
    _get(_EXCLUDE)(path)
    jax.extend.source_info_util.register_exclusion(path)


def inlined_func_call(function: Any, operands: Sequence[Any]) -> list[Any]:
    """Copies the body of a `func.func` to the insertion point.

    Args:
        function: operation of the function, which has one block.
        operands: what takes the place of its arguments.

    Returns:
        What takes the place of its results.
    """
    return list(_get("jax._src.lib:jax_mlir_ext").inlined_func_call(function, operands))


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(name)


def _get(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(_module(module), name)


def hlo_proto_text(proto: bytes) -> str:
    """The text of a serialized HloModuleProto, with its constants.

    XLA ends the process on a proto that contradicts itself: call it in a process of
    its own.
    """
    hlo = _get("jaxlib:_hlo")
    module = hlo.HloModule.from_serialized_hlo_module_proto(proto)
    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    return module.to_string(options)


def stablehlo_as_hlo_text(mlir: str) -> str:
    """A StableHLO module as HLO text, as XLA reads it before it optimizes.

    Raises:
        RuntimeError or a child: it can not be said in HLO (dynamic shapes).
    """
    convert = _get("jax._src.lib:_jax").mlir.mlir_module_to_xla_computation
    computation = convert(mlir, use_tuple_args=False, return_tuple=False)
    return hlo_proto_text(computation.as_serialized_hlo_module_proto())
