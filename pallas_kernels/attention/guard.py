"""Kernels for sites whose named form holds only where every query sees a key.

A mask that is added to the scores, a learned bias beside a causal mask: as long as
each query has a key left, a kernel that knows masks and biases by name is exact. In a
query that has none, the site computes something that only its literal score function
says. Which of the two an input is, a device can tell from masks and biases alone, so
the kernel and "online" on the literal scores are the branches of a conditional. Under
shard_map each device decides for its own rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hlo_tools.composites import (
    HIGHEST_BIAS,
    LOWEST_BIAS,
    AttentionSpec,
    Implementation,
    visible_keys,
)
from hlo_tools.gradients import GradImplementation, GradSpec
from hlo_tools.targets import Target
from pallas_kernels.attention import cost, online, tiles

# No kernel is asked to add less: cuDNN multiplies by log2(e), and float32's lowest
# number would be -inf. As low as this the key counts for nothing all the same.
LOWEST_ADDED = -float(2 << 40)
# What "online" leaves for its backward half, a maximum and a sum of exponentials.
LITERAL_RESIDUALS = 2
# In the place of that sum, which is no negative number: the kernel has run.
KERNEL_RAN = -1.0
# Calls of a conditional: the predicate, and its copy to the host. Not measured.
CALLS = 4


def guarded(implementation: Implementation, spec: AttentionSpec) -> Implementation:
    """Returns an implementation as it runs a guarded site.

    Args:
      implementation: one that knows nothing of `AttentionSpec.guarded`.
      spec: the site.
    """
    # All that names are good for to "online" is leaving out key blocks. In
    # milliseconds on two cores, B2 T1024 H4 D64, under the guard and literally: causal
    # 26 and 40, with the backward pass 128 and 226; without a band 71 and 47, 125 and
    # 110. But narrow scores are rounded literally, while XLA's own code keeps them in
    # float32 within a fusion, and so do the names.
    wide = all(
        jnp.dtype(dtype).itemsize >= 4
        for dtype in (spec.score_dtype, spec.softmax_dtype)
    )
    if implementation.name == "online" and spec.band == (None, None) and wide:
        return _literal(implementation)
    return _guarded(implementation)


@functools.cache
def _literal(implementation: Implementation) -> Implementation:
    """Returns an implementation of any scores that ignores all names."""
    return _changed(implementation, literal_spec)


@functools.cache
def _guarded(implementation: Implementation) -> Implementation:
    """Returns an implementation as one branch of a conditional."""
    kernel = _changed(implementation, kernel_spec)
    literal = _literal(online.IMPLEMENTATION)
    return dataclasses.replace(
        kernel,
        seconds=lambda *site: kernel.seconds(*site) + guard_seconds(*site),
        temp_bytes=lambda *site: max(
            kernel.temp_bytes(*site), literal.temp_bytes(*site)
        ),
        build=lambda *site: functools.partial(
            _forward, site[0], kernel.build(*site), literal.build(*site)
        ),
        grad=None if kernel.grad is None else _guarded_grad(kernel.grad, literal.grad),
    )


def _guarded_grad(
    kernel: GradImplementation, literal: GradImplementation | None
) -> GradImplementation:
    assert literal is not None

    def seconds(spec: AttentionSpec, grad: GradSpec, target: Target) -> float:
        calls = CALLS * target.spec.launch_seconds  # the backward half only branches
        own = kernel.seconds(spec, grad, target)
        return own + guard_seconds(spec, target) + calls

    def build(*site) -> tuple[Callable, Callable]:
        by_kernel, by_literal = kernel.build(*site), literal.build(*site)
        return (
            functools.partial(_forward_half, site[0], by_kernel[0], by_literal[0]),
            functools.partial(_backward_half, site[0], by_kernel[1], by_literal[1]),
        )

    return GradImplementation(
        supports=kernel.supports,
        seconds=seconds,
        temp_bytes=lambda *site: max(
            kernel.temp_bytes(*site), literal.temp_bytes(*site)
        ),
        build=build,
    )


def _changed(
    implementation: Implementation, change: Callable[[AttentionSpec], AttentionSpec]
) -> Implementation:
    """Returns an implementation that is shown another spec than the site's own."""

    def of(function: Callable) -> Callable:
        return lambda spec, *rest: function(change(spec), *rest)

    grad = implementation.grad
    if grad is not None:
        grad = GradImplementation(
            supports=of(grad.supports),
            seconds=of(grad.seconds),
            temp_bytes=of(grad.temp_bytes),
            build=of(grad.build),
        )
    return Implementation(
        name=implementation.name,
        platforms=implementation.platforms,
        supports=of(implementation.supports),
        seconds=of(implementation.seconds),
        temp_bytes=of(implementation.temp_bytes),
        config=of(implementation.config),
        build=of(implementation.build),
        grad=grad,
    )


def named_spec(spec: AttentionSpec) -> AttentionSpec:
    """Returns a guarded site as its names have it."""
    return dataclasses.replace(spec, guarded=False, exact_mod=None)


def kernel_spec(spec: AttentionSpec) -> AttentionSpec:
    """Returns a guarded site as it is where every query sees a key."""
    return dataclasses.replace(
        named_spec(spec),
        score_mod=None,
        rows_never_empty=True,
        bias_fn=functools.partial(_bounded, spec.bias_fn) if spec.has_bias else None,
    )


def _bounded(bias_fn: Callable, *arguments) -> jax.Array:
    return jnp.maximum(bias_fn(*arguments), LOWEST_ADDED)


def literal_spec(spec: AttentionSpec) -> AttentionSpec:
    """Returns a guarded site as it is for any inputs, without names."""
    return dataclasses.replace(
        spec,
        named=False,
        guarded=False,
        score_mod=spec.exact_mod,
        exact_mod=None,
        softcap=None,
        causal=False,
        window=None,
        offset=0,
        has_bias=False,
        bias_dtype=None,
        has_mask=False,
        mask_fill=None,
        rows_never_empty=False,
        bias_fn=None,
        mask_fn=None,
    )


def guard_seconds(spec: AttentionSpec, target: Target) -> float:
    """Predicts the time of `every_query_sees_a_key` and of a conditional."""
    read = sum(
        math.prod(side.shape) * jnp.dtype(side.dtype).itemsize for side in spec.sides
    )
    bandwidth = cost.BANDWIDTH_EFFICIENCY * target.spec.memory_bandwidth
    return read / bandwidth + CALLS * target.spec.launch_seconds


def every_query_sees_a_key(spec: AttentionSpec, *sides: jax.Array) -> jax.Array:
    """Returns whether the named form of a guarded site holds for these inputs.

    Args:
      spec: the site; it has a mask or a bias.
      *sides: [B|1,K|1,G|1,T|1,S|1] each.

    Returns:
      bool []; False if a bias is NaN.
    """
    positions = (
        jnp.arange(spec.q_len, dtype=jnp.int32),
        jnp.arange(spec.k_len, dtype=jnp.int32),
    )
    keep, bounded = jnp.ones((1,) * 5, bool), jnp.bool(True)
    if spec.has_mask:
        keep = tiles.rank5(spec.mask_fn(sides, *positions))
    if spec.has_bias:
        bias = tiles.rank5(spec.bias_fn(sides, *positions))
        keep = keep & (bias >= LOWEST_BIAS)
        bounded = (bias <= HIGHEST_BIAS).all()
    if keep.shape[3] == 1 and spec.band != (None, None):
        return bounded & _all_see_one_of(spec, keep)
    band = visible_keys(spec, *positions)
    keep = keep if band is None else keep & band
    return bounded & keep.any(-1).all()


def _all_see_one_of(spec: AttentionSpec, keep: jax.Array) -> jax.Array:
    """Tells it without [T,S] where all queries have the same keys to choose from.

    Args:
      spec: a site with a band; each query has some key within it.
      keep: [B|1,K|1,G|1,1,S|1], keys that are not hidden otherwise.

    Returns:
      bool [], whether each query has one of these within the band.
    """
    low, high = spec.band
    keep = jnp.broadcast_to(keep, (*keep.shape[:4], spec.k_len))
    numbers = jnp.arange(spec.k_len, dtype=jnp.int32)
    latest = lax.cummax(jnp.where(keep, numbers, -1), axis=4)  # up to each key
    queries = np.arange(spec.q_len, dtype=np.int32)
    first = np.maximum(queries + (-spec.q_len if low is None else low), 0)
    # The first `inner` queries end at key i + high, the others at the last key.
    inner = 0 if high is None else min(max(spec.k_len - high, 0), spec.q_len)
    start = high if high is not None and inner else 0
    found = latest[..., start : start + inner] >= first[:inner]
    return found.all() & (latest[..., -1:] >= first[inner:]).all()


def _forward(
    spec: AttentionSpec, kernel: Callable, literal: Callable, *arrays: jax.Array
) -> jax.Array:
    """Runs one of two functions of q, k, v and the sides."""
    return lax.cond(every_query_sees_a_key(spec, *arrays[3:]), kernel, literal, *arrays)


def _forward_half(
    spec: AttentionSpec, kernel: Callable, literal: Callable, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Runs one of two forward halves; the other's residuals are made up.

    Returns:
      (out, *residuals of the kernel, *residuals of "online").
    """
    kept = jax.eval_shape(kernel, *arrays)[1:]
    stats = jax.eval_shape(literal, *arrays)[1:]
    assert len(stats) == LITERAL_RESIDUALS

    def by_kernel(*arrays):
        return (*kernel(*arrays), *_filled(stats, KERNEL_RAN))

    def by_literal(*arrays):
        out, *own = literal(*arrays)
        return (out, *_filled(kept, 0.0), *own)

    seen = every_query_sees_a_key(spec, *arrays[3:])
    return lax.cond(seen, by_kernel, by_literal, *arrays)


def _filled(shapes: Any, value: float) -> list[jax.Array]:
    return [jnp.full(x.shape, value, x.dtype) for x in shapes]


def _backward_half(
    spec: AttentionSpec, kernel: Callable, literal: Callable, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Runs the backward half that belongs to the forward half that has run.

    The residuals say which: the predicate, were it computed again, might be rounded
    otherwise.
    """
    inputs = 3 + len(spec.sides)
    operands, (out, *residuals, dout) = arrays[:inputs], arrays[inputs:]
    own, stats = residuals[:-LITERAL_RESIDUALS], residuals[-LITERAL_RESIDUALS:]

    def by_kernel(*_):
        return tuple(kernel(*operands, out, *own, dout))

    def by_literal(*_):
        return tuple(literal(*operands, out, *stats, dout))

    return lax.cond(stats[1][0, 0, 0] < 0, by_kernel, by_literal)
