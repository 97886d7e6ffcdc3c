"""Pieces that the kernels for Hopper GPUs share.

A kernel runs in warpgroups of 128 threads: some compute, one copies. They meet at
named barriers, of which a block has 16; copies arrive at Pallas barriers.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

# Shared memory of one block, in bytes: CUDA programming guide, compute capability 9.0.
MAX_SHARED_BYTES = 227 * 1024
WARPGROUP = 128
# Every so many columns of an accumulator belong to the same threads.
THREAD_COLUMNS = 8
# Of the named ones; the lower ones are Pallas's own, see the kernels' plans.
LAST_BARRIER = 15

# An accumulator of the tensor cores; pyright can not see through it.
ACC: Any = plgpu.WGMMAAccumulatorRef

WGMMA = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def arrive(barrier: int | jax.Array, num_threads: int) -> None:
    """Arrives at a named barrier without waiting."""
    _named_barrier("arrive", barrier, num_threads)


def sync(barrier: int | jax.Array, num_threads: int) -> None:
    """Arrives at a named barrier and waits until `num_threads` have."""
    _named_barrier("sync", barrier, num_threads)


def _named_barrier(operation: str, barrier_id, num_threads: int) -> None:
    # The interpret mode knows this function by its name and its closure.
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))

    @inline
    def bar_op(_, barrier_id):
        mgpu_utils.inline_ptx(
            f"bar.{operation} $0, {num_threads};", barrier_id.registers[()]
        )

    bar_op(jnp.asarray(barrier_id, jnp.int32))


def tiled(shape: tuple[int, ...], dtype) -> Any:
    """Returns shared memory that `wgmma` and the copy engine read, swizzled.

    Args:
      shape: [..., rows, columns].
      dtype: of the elements.
    """
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    kinds: Any = plgpu
    tiling = kinds.TilingTransform((8, 8 * swizzle // bits))
    transforms = (tiling, kinds.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms)


def interpreted_product(a: jax.Array, b) -> jax.Array:
    """Returns a @ b in float32, for the interpret mode.

    It knows no product whose left side is in registers.

    Args:
      a: [m,k].
      b: [k,n] in shared memory.
    """
    value = jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    plgpu.commit_smem()  # b was read by a thread, not by the tensor cores
    return value


def spread(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of one number a row, [m] -> [m,n]."""
    return jax.lax.broadcast_in_dim(rows, shape, [0])


def iota(shape: tuple[int, ...], dim: int) -> jax.Array:
    """Returns int32 [m,n], the row or column number."""
    return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=WGMMA)


def row_vector(size: int, value: float) -> jax.Array:
    """Returns float32 [size], one number a row of an accumulator."""
    return plgpu.layout_cast(jnp.full((size,), value, jnp.float32), ROWS)


def zeros(shape: tuple[int, int]) -> jax.Array:
    """Returns a float32 accumulator of zeros."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


_INTERPRETING = contextvars.ContextVar("interpreting", default=False)


def interpreting() -> bool:
    """Returns whether kernels are traced for the interpret mode."""
    return _INTERPRETING.get()


@contextlib.contextmanager
def interpret_mode(detect_races: bool = True) -> Iterator[None]:
    """Runs kernels on the CPU as long as it lasts, thread by thread, for tests.

    Args:
      detect_races: report accesses to shared memory that nothing keeps apart.
    """
    params = plgpu.InterpretGPUParams(
        detect_races=detect_races, inline_mgpu="_hack_model_inline_mgpu_tokamax"
    )
    device = AbstractDevice("NVIDIA H200", platform="gpu", num_cores=132)
    mesh = AbstractMesh((), (), abstract_device=device)
    token = _INTERPRETING.set(True)
    try:
        with use_abstract_mesh(mesh), plgpu.force_gpu_interpret_mode(params):
            yield
    finally:
        _INTERPRETING.reset(token)


@functools.cache
def compiler_params() -> plgpu.CompilerParams:
    """Returns how all kernels here are compiled.

    They synchronize for themselves, and reduce only within warps.
    """
    return plgpu.CompilerParams(
        approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
    )


def padded(array: jax.Array, dim: int, multiple: int, value: float = 0) -> jax.Array:
    """Returns an array with `value` after it, up to a multiple in one dimension."""
    missing = -array.shape[dim] % multiple
    if not missing:
        return array
    widths = [(0, 0)] * array.ndim
    widths[dim] = (0, missing)
    return jnp.pad(array, widths, constant_values=value)


def multiprocessors() -> int:
    """Returns how many multiprocessors the kernels are for: 132, as an H100 or H200."""
    return 132
