"""Attention with its gradients, over whichever backends may run it.

Backends know nothing of sinks, of vmap or of the gradient of the logsumexp: a sink
is one more term of a finished softmax, a vmapped dim is more of the batch, and the
gradient of the logsumexp is taken off delta (see `Backend.backward`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.attention.backends import Candidates
from pallas_kernels.attention.problem import AttentionProblem, Gradients, Operands

# Where float32 knows the logsumexp to less than half a unit of bfloat16.
LARGEST_STATISTIC = 2.0**15


@dataclass(frozen=True)
class Call:
    """What is known of a call before its arrays are.

    Attributes:
      problem: what is computed.
      candidates: what may compute it.
      config: for the backend, or None.
      with_lse: the caller uses the logsumexp.
      deterministic: two runs of the backward pass shall agree bit for bit.
    """

    problem: AttentionProblem
    candidates: Candidates
    config: Any
    with_lse: bool
    deterministic: bool

    @property
    def seen(self) -> AttentionProblem:
        """What backends see of the problem."""
        return replace(self.problem, sinks=False)

    def forward_backend(self) -> Any:
        """Returns what computes the results."""
        return self.candidates.forward(self.seen)

    def backward_backend(self, wants_bias: bool) -> Any:
        """Returns what computes the gradients."""
        return self.candidates.backward(
            self.seen, wants_bias, self.with_lse, self.deterministic
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Computes attention.

    Args:
      call: what is known of it.
      operands: its arrays.

    Returns:
      out [B,T,H,Dv] in the dtype of q; lse [B,H,T], float32 or float64.
    """
    out, lse = _forward(call, operands._replace(sinks=None))
    if operands.sinks is None:
        return out, lse
    sinks = operands.sinks.astype(lse.dtype)[None, :, None]
    total = jnp.logaddexp(lse, sinks)
    share = jnp.exp(lse - jnp.where(total == -jnp.inf, 0, total))
    share = jnp.transpose(share, (0, 2, 1))[..., None]  # [B,T,H,1]
    return (out.astype(lse.dtype) * share).astype(out.dtype), total


def _attend_forward(call: Call, primals: Operands) -> tuple[Any, Any]:
    operands = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
    bias: Any = primals.bias
    wants_bias = bias is not None and bias.perturbed
    call.backward_backend(wants_bias)  # refuses now, not after the forward pass
    results: Any = attend(call, operands)
    out, lse = results
    # Residuals are arrays; a flag is whether there is a node.
    return (out, lse), (operands, out, lse, () if wants_bias else None)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _attend_backward(call: Call, residuals: Any, cotangents: Any) -> tuple[Operands]:
    operands, out, lse, flag = residuals
    dout, dlse = cotangents
    empty = lse == -jnp.inf
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros_like(out)
    wide = lse.dtype
    delta = (out.astype(wide) * dout.astype(wide)).sum(-1)  # [B,T,H]
    delta = jnp.transpose(delta, (0, 2, 1))
    if not isinstance(dlse, SymbolicZero):
        delta = delta - dlse
    delta = jnp.where(empty, 0, delta)
    if operands.bias is not None:
        dout, delta = _without_lost_rows(lse, delta, dout)
    found = _backward(
        call, flag is not None, operands._replace(sinks=None),
        jnp.where(empty, jnp.inf, lse), delta, out, dout,
    )  # fmt: skip
    dsinks = None
    if operands.sinks is not None:
        share = jnp.exp(operands.sinks.astype(wide)[None, :, None] - lse)
        terms = jnp.where(empty, 0, share) * delta  # no value: dP is 0
        dsinks = -terms.sum((0, 2)).astype(operands.sinks.dtype)
    return (Operands(found.q, found.k, found.v, found.bias, sinks=dsinks),)


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _without_lost_rows(
    lse: jax.Array, delta: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns dout and delta with NaN in rows whose probabilities are lost.

    A logsumexp of large magnitude says nothing about the sum: -1e9 + log(40) is -1e9
    in float32. A bias that hides all keys by -1e9 makes such rows. If they have a
    cotangent, their gradients are NaN, not wrong numbers.

    Args:
      lse: [B,H,T].
      delta: [B,H,T].
      dout: [B,T,H,Dv].
    """
    lost = jnp.isfinite(lse) & (jnp.abs(lse) > LARGEST_STATISTIC)
    counts = jnp.transpose((dout != 0).any(-1), (0, 2, 1)) | (delta != 0)
    lost = lost & counts
    rows = jnp.transpose(lost, (0, 2, 1))[..., None]
    return jnp.where(rows, jnp.nan, dout), jnp.where(lost, jnp.nan, delta)


def alike_under_shard_map(operands: Operands) -> Operands:
    """Returns operands that all vary over the axes that any of them varies over.

    Under shard_map an operand that devices share has a gradient that is summed over
    them. JAX does that where such an operand is told apart, so not inside of `attend`.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return operands
    parts = [jax.lax.full_like(x, True, bool, ()) for x in operands if x is not None]
    always = functools.reduce(jnp.logical_or, parts)  # XLA drops it again
    return jax.tree.map(lambda x: jnp.where(always, x, jnp.zeros_like(x)), operands)


# Compiled once, also where the caller has no jit of its own.
@functools.partial(jax.jit, static_argnums=(0,))
def _run_forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    return call.forward_backend().forward(call.seen, call.config, operands)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_backward(
    call: Call,
    wants_bias: bool,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    out: jax.Array,
    dout: jax.Array,
) -> Gradients:
    backend = call.backward_backend(wants_bias)
    row = out if getattr(backend, "takes_out", False) else delta
    return backend.backward(
        call.seen, call.config, operands, lse, row, dout, wants_bias,
        call.deterministic,
    )  # fmt: skip


def _forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Runs the forward pass of a backend; vmap makes the batch larger."""

    @custom_vmap
    def run(operands: Operands):
        return _run_forward(call, operands)

    @run.def_vmap
    def run_batched(size: int, batched, operands: Operands):
        folded = _fold(call.problem, size, batched[0], operands)
        out, lse = _forward(_larger(call, size, folded), folded)
        return (_unfold(size, out), _unfold(size, lse)), (True, True)

    return run(operands)


def _backward(
    call: Call,
    wants_bias: bool,
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    out: jax.Array,
    dout: jax.Array,
) -> Gradients:
    """Runs the backward pass of a backend; vmap makes the batch larger."""

    @custom_vmap
    def run(operands: Operands, *rows: jax.Array):
        return _run_backward(call, wants_bias, operands, *rows)

    @run.def_vmap
    def run_batched(size: int, batched, operands: Operands, *rows: jax.Array):
        own_bias = wants_bias and operands.bias is not None
        folded = _fold(call.problem, size, batched[0], operands, own_bias)
        rows = tuple(
            _fold_batch(x, size, is_batched)
            for x, is_batched in zip(rows, batched[1:], strict=True)
        )
        found = _backward(_larger(call, size, folded), wants_bias, folded, *rows)
        found = Gradients(*(None if x is None else _unfold(size, x) for x in found))
        if found.bias is not None and operands.bias is not None:
            dbias = found.bias
            if operands.bias.shape[0] == 1:  # of each call, for all of its batch
                dbias = dbias.sum(1, keepdims=True)
            found = found._replace(bias=dbias.astype(operands.bias.dtype))
        return found, jax.tree.map(lambda _: True, found)

    return run(operands, lse, delta, out, dout)


def _fold(
    problem: AttentionProblem,
    size: int,
    batched: Operands,
    operands: Operands,
    own_bias: bool = False,
) -> Operands:
    """Returns the operands of `size` calls as those of one.

    Args:
      problem: of each.
      size: N, how many.
      batched: which operands have a leading dim N.
      operands: the operands.
      own_bias: each call has to have a bias of its own, for its gradient.
    """
    whole = {
        name: None if x is None else _fold_batch(x, size, getattr(batched, name))
        for name, x in operands._asdict().items()
        if name not in ("bias", "mask")
    }
    bias, mask = operands.bias, operands.mask
    if bias is not None:
        if own_bias:  # summed before it is rounded
            bias = bias.astype(jnp.promote_types(bias.dtype, jnp.float32))
        bias = _fold_scores(problem, bias, size, bool(batched.bias), own_bias)
    if mask is not None:
        mask = _fold_scores(problem, mask, size, bool(batched.mask), False)
    return Operands(**whole, bias=bias, mask=mask)


def _fold_batch(x: jax.Array, size: int, is_batched: bool) -> jax.Array:
    """Returns [N,B,...], or [B,...] that all share, as [N*B,...]."""
    if not is_batched:
        x = jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _fold_scores(
    problem: AttentionProblem, x: jax.Array, size: int, is_batched: bool, own: bool
) -> jax.Array:
    """Returns [N,B|1,...], or [B|1,...] that all share, as [N*B|1,...]."""
    rest = x.shape[-3:]
    if not is_batched and x.shape[0] == 1 and not own:
        return x
    if not is_batched:
        x = x[None]
    x = jnp.broadcast_to(x, (size, problem.batch, *rest))
    return x.reshape(size * problem.batch, *rest)


def _unfold(size: int, x: jax.Array) -> jax.Array:
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


def _larger(call: Call, size: int, folded: Operands) -> Call:
    """Returns the call of folded operands."""
    bias, mask = folded.bias, folded.mask
    problem = replace(
        call.problem,
        batch=size * call.problem.batch,
        bias=None if bias is None else bias.shape,
        bias_dtype=None if bias is None else bias.dtype.name,
        mask=None if mask is None else mask.shape,
    )
    return replace(call, problem=problem)
