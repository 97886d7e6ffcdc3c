"""The table of backends: what may compute an `AttentionProblem`, fastest first.

Add a backend: one file with a `Backend`, one row here. An object of any class will
do that has the attributes of `Backend`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from hlo_tools.errors import UnknownNameError, UnsupportedError
from hlo_tools.targets import Target
from pallas_kernels.attention.problem import (
    AttentionProblem,
    Gradients,
    Operands,
    operand_shapes,
)

# name -> "module:attribute", in the order in which they are tried
BACKENDS: dict[str, str] = {
    "mosaic-gpu": "pallas_kernels.attention.gpu:BACKEND",
    "tpu": "pallas_kernels.attention.tpu_backend:BACKEND",
    "cudnn": "pallas_kernels.attention.cudnn_backend:BACKEND",
    "online": "pallas_kernels.attention.online_backend:BACKEND",
    "reference": "pallas_kernels.attention.reference:BACKEND",
}
# What a backend is asked about where it is named but made for other devices: it may
# be interpreted there, or compiled for a device that is not attached.
STAND_INS: dict[str, str] = {"cpu": "cpu", "gpu": "h200", "tpu": "v5e"}


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and its gradients.

    A backend is never handed sinks, and `problem.sinks` is False: the API puts them
    into `out` and `lse`. Products of float32 operands are float32 products.

    Attributes:
      name: as in `BACKENDS`.
      platforms: of "cpu", "gpu", "tpu".
      supports: (problem, target) -> None, or the reason why it can not run.
      forward: (problem, config, operands) -> out [B,T,H,Dv] in `problem.dtype` and
        lse float32 [B,H,T] (float64 for a float64 problem). A query that sees no key
        has out 0 and lse -inf. `config` is None, or what the caller gave.
      supports_backward: (problem, target, wants_bias) -> as `supports`.
      backward: (problem, config, operands, lse, delta, dout, wants_bias,
        deterministic) -> `Gradients`, from P = exp(scores - lse) and dscores =
        P * (dout v^T - delta). lse is that of the whole softmax, the sink included,
        and +inf for a query without a gradient, so that its P is 0; delta = rowsum(out
        * dout) - dlse, in the dtype and shape of lse. `Gradients.bias` is None
        unless `wants_bias`. If `deterministic`, two runs agree bit for bit.
      deterministic: whether `backward` can be; taken as True where it is missing.
      takes_out: whether `backward` takes the final out [B,T,H,Dv] in place of delta,
        and has no gradient of lse; taken as False where it is missing.
    """

    name: str
    platforms: tuple[str, ...]
    supports: Callable[[AttentionProblem, Target], str | None]
    forward: Callable[[AttentionProblem, Any, Operands], tuple[jax.Array, jax.Array]]
    supports_backward: Callable[[AttentionProblem, Target, bool], str | None]
    backward: Callable[..., Gradients]
    deterministic: bool = True
    takes_out: bool = False


def empty_operand(problem: AttentionProblem) -> str | None:
    """Returns that an operand is empty, for `Backend.supports`, or None."""
    shapes = operand_shapes(problem)
    if any(0 in x.shape for x in (shapes.q, shapes.k, shapes.v)):
        return "an operand is empty"
    return None


@functools.cache
def load_backend(name: str) -> Any:
    """Returns the backend of a row of `BACKENDS`.

    Raises:
      UnknownNameError: there is no such row.
      UnsupportedError: it needs a package that is not installed.
    """
    if name not in BACKENDS:
        raise UnknownNameError("implementation", name, BACKENDS)
    module, _, attribute = BACKENDS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise UnsupportedError(f"it can not be imported: {error}") from error


@dataclass(frozen=True)
class Candidates:
    """Which backends may run a call, in order.

    Attributes:
      names: rows of `BACKENDS`.
      target: what the call runs on.
      insists: the caller named exactly one: it runs whatever the platform, and
        refuses by an error.
    """

    names: tuple[str, ...]
    target: Target
    insists: bool

    @classmethod
    def of(cls, implementation: str | Sequence[str] | None) -> Candidates:
        """Returns the candidates of the argument `implementation`.

        Raises:
          UnknownNameError: a name is in no row.
          ValueError: an empty list.
        """
        names = BACKENDS if implementation is None else implementation
        names = (names,) if isinstance(names, str) else tuple(names)
        for name in names:
            if name not in BACKENDS:
                raise UnknownNameError("implementation", name, BACKENDS)
        if not names:
            raise ValueError(
                "implementation: got an empty list, expected names of"
                f" {', '.join(BACKENDS)}, or None for the fastest that can"
            )
        return cls(names, default_target(), isinstance(implementation, str))

    def forward(self, problem: AttentionProblem) -> Any:
        """Returns the first backend that can compute `problem`.

        Raises:
          UnsupportedError: none can; says why, one by one.
        """

        def why_not(backend: Any, target: Target) -> str | None:
            return backend.supports(problem, target)

        return self._first(why_not, "attention")

    def backward(
        self,
        problem: AttentionProblem,
        wants_bias: bool,
        with_lse: bool,
        deterministic: bool,
    ) -> Any:
        """Returns the first backend that can compute the gradients of `problem`.

        Args:
          problem: the problem.
          wants_bias: whether that of the bias is wanted.
          with_lse: whether the logsumexp has a cotangent as well.
          deterministic: whether two runs have to agree.

        Raises:
          UnsupportedError: none can; says why, one by one.
        """

        def why_not(backend: Any, target: Target) -> str | None:
            if deterministic and not getattr(backend, "deterministic", True):
                return "its gradients are not deterministic"
            if with_lse and getattr(backend, "takes_out", False):
                return "it has no gradient of the logsumexp"
            return backend.supports(problem, target) or backend.supports_backward(
                problem, target, wants_bias
            )

        return self._first(why_not, "the gradients of attention")

    def _first(self, why_not: Callable[[Any, Target], str | None], what: str) -> Any:
        reasons = []
        for name in self.names:
            backend, reason = self._ask(name, why_not)
            if reason is None:
                return backend
            reasons.append(f"{name}: {reason}")
        raise UnsupportedError(
            f"no implementation can compute {what} on {self.target.device_kind}:\n  "
            + "\n  ".join(reasons)
        )

    def _ask(
        self, name: str, why_not: Callable[[Any, Target], str | None]
    ) -> tuple[Any, str | None]:
        try:
            backend = load_backend(name)
        except UnsupportedError as error:
            return None, str(error)
        target = self.target
        if target.platform not in backend.platforms:
            if not self.insists:
                platforms = " and ".join(backend.platforms)
                return backend, f"it runs on {platforms}, not on {target.platform}"
            target = Target.parse(STAND_INS[backend.platforms[0]])
        return backend, why_not(backend, target)


def default_target() -> Target:
    """Returns the device that JAX puts a computation on."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    # Neither the device itself nor how many there are may change what is traced.
    return replace(Target.from_devices([device]), devices=(device,))
