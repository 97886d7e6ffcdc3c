"""What a kernel with choices is: its configurations, and their predicted times.

A `KernelFamily` is all that the selector, the tuner and the reports know of a kernel.
Add a family: one file with a `KernelFamily`, and one row in families.py.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any, Self

from hlo_tools.errors import KernelConfigError, UnknownNameError
from hlo_tools.targets import Target

_CHECKED_TYPES = (bool, int, float, str)


@dataclass(frozen=True)
class KernelConfig:
    """Base of the choices of one kernel: block sizes and the like, plain values."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Returns the configuration that `to_dict` wrote.

        Args:
          values: field name -> value; fields with a default may be absent.

        Raises:
          KernelConfigError: a field is unknown, absent, or of another type.
        """
        known = {item.name: item for item in fields(cls)}
        for name in values:
            if name not in known:
                error = UnknownNameError("field", name, known)
                raise KernelConfigError(f"{cls.__name__}: {error}")
        missing = [
            name
            for name, item in known.items()
            if name not in values and not _has_default(item)
        ]
        if missing:
            given = ", ".join(values) or "none"
            raise KernelConfigError(
                f"{cls.__name__}: no value for {', '.join(missing)} (given: {given})"
            )
        hints = typing.get_type_hints(cls)
        for name, value in values.items():
            wanted = hints[name]
            # bool is an int in Python, and 1 is not True in a table
            if wanted in _CHECKED_TYPES and type(value) is not wanted:
                raise KernelConfigError(
                    f"{cls.__name__}: {name} is {value!r}, which is no"
                    f" {wanted.__name__}"
                )
        return cls(**values)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.to_dict().items())


def _has_default(item: Field) -> bool:
    return item.default is not MISSING or item.default_factory is not MISSING


@dataclass(frozen=True)
class Term:
    """One part of a predicted time.

    Attributes:
      name: such as "tensor cores".
      busy: seconds that the resource works, whether or not something else does.
      exposed: seconds that it adds to the whole; the rest is hidden behind others.
    """

    name: str
    busy: float
    exposed: float


@dataclass(frozen=True)
class Prediction:
    """A predicted time and what it is made of.

    Attributes:
      terms: their exposed parts add up to the whole.
      notes: name -> a number that is no time, such as CTAs and waves.
    """

    terms: tuple[Term, ...]
    notes: Mapping[str, float | int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The whole time."""
        return sum(term.exposed for term in self.terms)

    @property
    def bound_by(self) -> str:
        """The name of the term that adds most."""
        return max(self.terms, key=lambda term: term.exposed).name


@dataclass(frozen=True)
class KernelFamily:
    """One kernel with choices.

    Attributes:
      name: as in the table of families.
      problem_class: a frozen dataclass of what one call computes.
      config_class: of its choices.
      space: (problem, target) -> all configurations worth a thought, in an order that
        decides between equal predictions: the first wins.
      refuse: (problem, config, target) -> None, or why it can not run.
      predict: (problem, config, target) -> its time.
      make_inputs: (problem, seed) -> the arrays of a call, random.
      run: (problem, config) -> function of those arrays, to be jitted.
      presets: name -> problems to measure.
    """

    name: str
    problem_class: type
    config_class: type[KernelConfig]
    space: Callable[[Any, Target], Iterable[KernelConfig]]
    refuse: Callable[[Any, Any, Target], str | None]
    predict: Callable[[Any, Any, Target], Prediction]
    make_inputs: Callable[[Any, int], tuple[Any, ...]]
    run: Callable[[Any, Any], Callable[..., Any]]
    presets: Mapping[str, Callable[[], tuple[Any, ...]]]

    def key(self, problem: Any) -> str:
        """Returns the exact name of a problem in tables; `problem_of` reads it."""
        return problem_key(problem)

    def problem_of(self, key: str) -> Any:
        """Returns the problem that `key` was made of.

        Raises:
          KernelConfigError: it is no key of this family.
        """
        return problem_from_key(self.problem_class, key)

    def candidates(
        self,
        problem: Any,
        target: Target,
        refused: dict[KernelConfig, str] | None = None,
    ) -> list[KernelConfig]:
        """Returns the configurations that can run.

        Args:
          problem: what is computed.
          target: on what.
          refused: filled with the others and the reasons.
        """
        legal = []
        for config in self.space(problem, target):
            reason = self.refuse(problem, config, target)
            if reason is None:
                legal.append(config)
            elif refused is not None:
                refused[config] = reason
        return legal


def problem_key(problem: Any) -> str:
    """Returns a string that is equal exactly for equal problems.

    Fields at their defaults are left out, so that a field added later, with a default,
    leaves the keys in stored tables as they are.

    Args:
      problem: a dataclass of numbers, strings and tuples of them.
    """
    values = {
        item.name: getattr(problem, item.name)
        for item in fields(problem)
        if item.default is MISSING or getattr(problem, item.name) != item.default
    }
    return json.dumps(values, separators=(",", ":"), sort_keys=True)


def problem_from_key(problem_class: type, key: str) -> Any:
    """Returns the problem of a key.

    Args:
      problem_class: its dataclass.
      key: JSON, as `problem_key` writes it; spaces and order do not matter.

    Raises:
      KernelConfigError: it is none.
    """
    try:
        values = json.loads(key)
        values = {name: _as_tuples(value) for name, value in values.items()}
        return problem_class(**values)
    except (ValueError, AttributeError, TypeError) as error:
        name = problem_class.__name__
        raise KernelConfigError(f"no {name}: {key!r}: {error}") from error


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
