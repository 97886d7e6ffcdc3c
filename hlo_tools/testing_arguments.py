"""The arguments of a function under test: what is traced, and what is as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SCALARS = (bool, int, float, complex)


def _is_traced(leaf: Any) -> bool:
    """Returns whether `jax.jit` takes a leaf; another can only be a static one."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OUSMm"
    return isinstance(leaf, (jax.Array, *_SCALARS)) or hasattr(leaf, "__jax_array__")


def is_float(leaf: Any) -> bool:
    """Returns whether a leaf is real and can be differentiated."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.floating)


def as_array(leaf: Any) -> np.ndarray:
    """Returns a leaf as NumPy has it; of a random key, its data."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is an array of random keys."""
    return jnp.issubdtype(getattr(leaf, "dtype", np.bool_), jax.dtypes.prng_key)


@dataclass
class Call:
    """A call of a function, as a function of the arrays in its arguments.

    Args:
      f: the function; of one that is decorated, what it decorates.
      args, kwargs: its arguments, pytrees.
      static_argnums, static_argnames: those that are not traced, as for `jax.jit`.
        Leaves that are neither arrays nor numbers never are.

    Attributes:
      function: of the traced leaves.
      leaves: what to call it with.
      names: of those leaves: "args[0]['q']".
    """

    f: Callable
    args: tuple
    kwargs: dict[str, Any]
    static_argnums: int | Sequence[int] = ()
    static_argnames: str | Sequence[str] = ()
    function: Callable = field(init=False)
    leaves: list[Any] = field(init=False)
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        f = self.f
        self.f = getattr(f, "__wrapped__", f) if hasattr(f, "reports") else f
        static = {("args", number) for number in self._static_positions()}
        static |= {("kwargs", name) for name in _as_sequence(self.static_argnames)}
        named, structure = jax.tree_util.tree_flatten_with_path(
            (self.args, self.kwargs)
        )
        fixed = [leaf for _, leaf in named]
        self.leaves, self.names, self._owners, places = [], [], [], []
        for place, (path, leaf) in enumerate(named):
            where = "args" if path[0].idx == 0 else "kwargs"
            owner = where, path[1].idx if where == "args" else path[1].key
            if owner in static or not _is_traced(leaf):
                continue
            self.leaves.append(leaf)
            self.names.append(where + jax.tree_util.keystr(path[1:]))
            self._owners.append(owner)
            places.append(place)

        def function(*arrays):
            flat = list(fixed)
            for place, array in zip(places, arrays, strict=True):
                flat[place] = array
            positional, named = jax.tree.unflatten(structure, flat)
            return self.f(*positional, **named)

        function.__name__ = getattr(self.f, "__name__", "value")
        self.function = function

    def _static_positions(self) -> Iterator[int]:
        for number in _as_sequence(self.static_argnums):
            yield self._position(number, f"static_argnums={self.static_argnums!r}")
        for name in _as_sequence(self.static_argnames):
            if name not in self.kwargs:
                yield self._position_of(name, "static_argnames")

    def _position(self, number: Any, what: str) -> int:
        """Returns which of `args` a number means, counted from the end if negative."""
        count = len(self.args)
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise TypeError(f"{what}: got {number!r}, expected a position or a name")
        if not -count <= number < count:
            raise TypeError(f"{what}: there are {count} positional arguments")
        return int(number) % count

    def _position_of(self, name: str, what: str) -> int:
        """Returns which of `args` a parameter is."""
        parameters = list(inspect.signature(self.f).parameters.values())
        positional = [
            one.name
            for one in parameters[: len(self.args)]
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
        if name not in positional:
            known = ", ".join([*positional, *self.kwargs])
            raise TypeError(f"{what}: no argument {name!r} is given; got {known}")
        return positional.index(name)

    def differentiable(self, grad: Any) -> dict[int, str]:
        """Returns what to differentiate by: number of the leaf -> name.

        Args:
          grad: True for every float leaf; else positions or names of arguments.

        Raises:
          TypeError: there is no such argument.
          ValueError: none of them is a float.
        """
        owners = None
        if grad is not True:
            what, owners = f"grad={grad!r}", set()
            for one in _as_sequence(grad):
                if isinstance(one, str) and one in self.kwargs:
                    owners.add(("kwargs", one))
                elif isinstance(one, str):
                    owners.add(("args", self._position_of(one, what)))
                else:
                    owners.add(("args", self._position(one, what)))
        found = {
            number: self.names[number]
            for number, leaf in enumerate(self.leaves)
            if is_float(leaf) and (owners is None or self._owners[number] in owners)
        }
        if not found:
            raise ValueError(f"grad={grad!r}: none of these inputs is a float")
        return found

    def explained(self, error: Exception) -> Exception:
        """Returns what to raise if tracing failed: says what may have to be static."""
        traced = [
            f"{name} = {leaf!r}"
            for name, leaf in zip(self.names, self.leaves, strict=True)
            if isinstance(leaf, _SCALARS)
        ]
        refused = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
        is_static = isinstance(error, ValueError) and "static arg" in str(error)
        if not traced or not (isinstance(error, refused) or is_static):
            return error
        return TypeError(
            f"{self.function.__name__} can not be traced with {', '.join(traced)} as "
            "arrays; name those whose value it needs in static_argnums or "
            f"static_argnames: {str(error).splitlines()[0]}"
        )


def _as_sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)
