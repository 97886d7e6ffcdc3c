"""The contract of attention's gradient: what a program takes, and what it means.

An attention and its backward pass are bound together: the forward half hands the
backward half a few numbers a row, never the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from hlo_tools.composites import AttentionSpec, attention_ref

if TYPE_CHECKING:
    from hlo_tools.targets import Target

# "q", "k", "v", or the number of a side operand.
Wanted = str | int


@dataclass(frozen=True)
class GradSpec:
    """Which gradients a program takes from one attention site.

    Attributes:
      wanted: of what, in the order of the results: "q", "k", "v", or the number of
        a side operand (a float one).
      dtypes: of the results, in the same order.
      dout_dtype: of the cotangent of the site's result.
    """

    wanted: tuple[Wanted, ...]
    dtypes: tuple[str, ...]
    dout_dtype: str

    @property
    def sides(self) -> tuple[int, ...]:
        """The numbers of the side operands whose gradients are wanted."""
        return tuple(name for name in self.wanted if isinstance(name, int))


@dataclass(frozen=True)
class GradImplementation:
    """One way to run an attention together with its backward pass.

    Attributes:
      supports: (spec, grad, target) -> None, or the reason why it can not run.
      seconds: (spec, grad, target) -> predicted time of both halves.
      temp_bytes: (spec, grad, target) -> memory that they take beside operands,
        results and what the forward half leaves for the backward half.
      build: (spec, grad, target) -> (forward, backward).
        forward(q, k, v, *sides) -> (out, *residuals), out [B,T,H,Dv] in
        `spec.out_dtype`, each residual [B,H,T] (such as the logsumexp);
        backward(q, k, v, *sides, out, *residuals, dout) -> the gradients in the
        order of `grad.wanted`: [B,T,H,D], [B,S,K,D], [B,S,K,Dv] or the side's own
        shape, in `grad.dtypes`.  dout is [B,T,H,Dv].
    """

    supports: Callable[[AttentionSpec, GradSpec, Target], str | None]
    seconds: Callable[[AttentionSpec, GradSpec, Target], float]
    temp_bytes: Callable[[AttentionSpec, GradSpec, Target], int]
    build: Callable[[AttentionSpec, GradSpec, Target], tuple[Callable, Callable]]


def attention_grad_ref(
    spec: AttentionSpec,
    grad: GradSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *sides_and_dout: jax.Array,
) -> tuple[jax.Array, ...]:
    """Computes the gradients of a site in the plainest way.

    Args:
      spec: the site.
      grad: what is wanted.
      q: [B,T,H,D].
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      *sides_and_dout: the sides [B|1,K|1,G|1,T|1,S|1], then dout [B,T,H,Dv].

    Returns:
      The gradients in the order of `grad.wanted`, in float32 or float64.
    """
    *sides, dout = sides_and_dout
    names: list[Wanted] = ["q", "k", "v", *range(len(sides))]
    values = [q, k, v, *sides]
    places = [names.index(name) for name in grad.wanted]

    def run(*chosen):
        arrays = list(values)
        for place, array in zip(places, chosen, strict=True):
            arrays[place] = array
        return attention_ref(spec, *arrays)

    wide = [values[place].astype(spec.compute_dtype) for place in places]
    out, vjp = jax.vjp(run, *wide)
    return vjp(dout.astype(out.dtype))
