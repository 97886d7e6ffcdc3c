"""Patterns that users write: a reference and a replacement, both JAX functions.

    @hlo_tools.pattern(reference=slow_norm, example=(x, scale))
    def fast_norm(x, scale): ...

The program's operations that compute `slow_norm` are found, forward and backward,
and computed by `fast_norm` and its own derivative instead.
"""

from __future__ import annotations

import functools
import importlib.metadata
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from hlo_tools.errors import HloToolsError, UnknownNameError
from hlo_tools.module import StableHloModule
from hlo_tools.pipeline import PassContext, PassPipeline
from hlo_tools.report import RewriteReport
from hlo_tools.targets import Target

GROUP = "hlo_tools.patterns"
# Changes of the rank of the example that are tried as well: [T, D] for [B, T, D].
_RANKS = (0, -1, 1)


class PatternError(HloToolsError):
    """A pattern that can not be used as it is written."""


@dataclass(frozen=True)
class Traced:
    """A reference as operations.

    Attributes:
      module: keeps `outs` alive.
      types: of its arguments; for a backward pass, cotangents are the last ones.
      outs: what it computes: results, or one gradient for each float argument.
    """

    module: StableHloModule
    types: tuple[jax.ShapeDtypeStruct, ...]
    outs: tuple[Any, ...]


@dataclass(frozen=True)
class Pattern:
    """One row of the registry; made by `pattern`.

    Attributes:
      name: in reports, and as "hlo_tools.<name>" on composites.
      reference: the function to find.
      replacement: what computes it instead; None only outlines.
      example: arguments of `reference`; arrays or shapes. Other sizes match too,
        and one leading dimension more or less.
      when: called with the site's argument types (in the tree of `example`);
        whether to replace it.
    """

    name: str
    reference: Callable
    replacement: Callable | None
    example: tuple[Any, ...]
    when: Callable[..., bool] | None = None
    _cache: dict[Any, Traced | None] = field(default_factory=dict, compare=False)

    def __call__(self, *args: Any) -> Any:
        """Computes the replacement (or the reference, if there is none)."""
        return (self.replacement or self.reference)(*args)

    @property
    def types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of the example's arrays, flat."""
        return tuple(_type(leaf) for leaf in jax.tree.leaves(self.example))

    def unflatten(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Returns arguments in the tree of the example."""
        return jax.tree.unflatten(jax.tree.structure(self.example), list(leaves))

    def flat(self, function: Callable) -> Callable:
        """Returns a function of flat arguments with flat results."""
        return lambda *leaves: jax.tree.leaves(function(*self.unflatten(leaves)))

    def forward(self, function: Callable, types: Sequence[Any], residuals: bool):
        """Returns the function of flat arguments; `residuals`: as `jax.vjp` runs it."""
        flat = self.flat(function)
        if not residuals:
            return flat
        return lambda *leaves: jax.vjp(*_of_floats(flat, leaves))[0]

    def backward(self, function: Callable, types: Sequence[Any]) -> Callable:
        """Returns the function of arguments, then cotangents, to gradients."""
        count, flat = len(types), self.flat(function)

        def gradients(*leaves):
            outs, pull = jax.vjp(*_of_floats(flat, leaves[:count]))
            given = iter(leaves[count:])
            return pull([_cotangent(out, given) for out in outs])

        return gradients

    def cotangents(self, types: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of the cotangents of float results."""
        outs = jax.eval_shape(self.flat(self.reference), *types)
        return [_type(out) for out in outs if _is_float(out)]

    def traced(self, kind: str, types: Sequence[Any]) -> Traced | None:
        """Returns the reference for arguments of some types.

        Args:
          kind: "forward", "primal" (as a differentiated program has it), "backward".
          types: of the arguments, flat.

        Returns:
          None if the reference does not take such arguments.
        """
        key = (kind, tuple((t.shape, str(t.dtype)) for t in types))
        if key not in self._cache:
            try:
                self._cache[key] = self._trace(kind, tuple(types))
            except Exception:  # whatever a function raises for wrong arguments
                if key[1] == tuple((t.shape, str(t.dtype)) for t in self.types):
                    raise
                self._cache[key] = None
        return self._cache[key]

    def _trace(self, kind: str, types: tuple) -> Traced:
        if kind == "backward":
            function = self.backward(self.reference, types)
            types = (*types, *self.cotangents(types))
        else:
            function = self.forward(self.reference, types, kind == "primal")
        wide = any(str(t.dtype) in ("float64", "int64", "uint64") for t in types)
        with jax.enable_x64(wide or jax.config.jax_enable_x64):
            lowered = jax.jit(function, keep_unused=True).lower(*types)
        module = StableHloModule.parse(str(lowered.compiler_ir("stablehlo")))
        target = Target.parse("cpu")
        PassPipeline.parse("normalize").run(
            module, PassContext(target, RewriteReport("pattern", target.spec.name))
        )
        block = module.main.regions[0].blocks[0]
        outs = list(block.operations)[-1].operands
        return Traced(module, types, tuple(outs))

    def variants(self, kind: str) -> Iterator[Traced]:
        """Yields the reference for the example, and for one of another rank."""
        top = max((len(t.shape) for t in self.types), default=0)
        for change in _RANKS:
            if change and top < 2:
                return
            types = [
                _ranked(t, change) if len(t.shape) == top else t for t in self.types
            ]
            traced = self.traced(kind, types)
            if traced is not None:
                yield traced


def _of_floats(flat: Callable, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns a function of the float leaves alone, and these."""
    places = [n for n, leaf in enumerate(leaves) if _is_float(leaf)]

    def function(*floats):
        given = list(leaves)
        for place, value in zip(places, floats, strict=True):
            given[place] = value
        return flat(*given)

    return function, *[leaves[place] for place in places]


def _cotangent(out: Any, given: Iterator[Any]) -> Any:
    if _is_float(out):
        return next(given)
    return np.zeros(out.shape, jax.dtypes.float0)


def _is_float(value: Any) -> bool:
    return jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)


def _type(value: Any) -> jax.ShapeDtypeStruct:
    value = value if hasattr(value, "dtype") else np.asarray(value, np.float32)
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _ranked(one: jax.ShapeDtypeStruct, change: int) -> jax.ShapeDtypeStruct:
    shape = one.shape[1:] if change < 0 else (3,) * change + one.shape
    return jax.ShapeDtypeStruct(shape, one.dtype)


_registered: dict[str, Pattern] = {}
_lock = threading.Lock()


def pattern(
    *,
    reference: Callable,
    example: Sequence[Any],
    replacement: Callable | None = None,
    name: str | None = None,
    when: Callable[..., bool] | None = None,
) -> Any:
    """Registers a pattern: what `reference` computes, `replacement` is to compute.

    Args:
      reference: a JAX function of arrays (or trees of them).
      example: its arguments; only structure, ranks and dtypes matter.
      replacement: a JAX function of the same arguments with the same results, maybe
        a `jax.custom_vjp`. If left out, a decorator for it is returned.
      name: letters, digits, "_" and "-"; the replacement's own name if left out.
      when: called with the types of a site's arguments; false leaves the site alone.

    Returns:
      The `Pattern`, which can be called like the replacement.

    Raises:
      PatternError: the two differ in results, or can not be traced.
    """
    if replacement is None:
        return functools.partial(_made, reference, tuple(example), name=name, when=when)
    return _made(reference, tuple(example), replacement, name=name, when=when)


def _made(reference, example, replacement, *, name, when) -> Pattern:
    name = name or replacement.__name__
    if not name.replace("_", "").replace("-", "").isalnum():
        raise PatternError(
            f"pattern {name!r}: expected a name of letters, digits, _ and -"
        )
    made = Pattern(name, reference, replacement, example, when)
    want, got = (
        [_type(out) for out in jax.eval_shape(made.flat(f), *made.types)]
        for f in (reference, replacement)
    )
    if want != got:
        raise PatternError(
            f"pattern {name!r}: the replacement returns {got}, "
            f"expected what the reference returns: {want}"
        )
    register(made)
    return made


def register(one: Pattern) -> None:
    """Adds a pattern to the registry; one of the same name is replaced."""
    with _lock:
        _registered[one.name] = one


def unregister(one: Pattern) -> None:
    """Takes a pattern out of the registry."""
    with _lock:
        _registered.pop(one.name, None)


@functools.cache
def _installed() -> dict[str, Pattern]:
    entries = importlib.metadata.entry_points(group=GROUP)
    return {one.name: one for one in (entry.load() for entry in entries)}


def patterns(names: Sequence[str] = ()) -> list[Pattern]:
    """Returns registered and installed patterns: all, or those of some names.

    Raises:
      UnknownNameError: there is none of a name.
    """
    known = {**_installed(), **_registered}
    for name in names:
        if name not in known:
            raise UnknownNameError("pattern", name, list(known))
    return [known[name] for name in names or known]
