"""Both jits, for tests that ask the same of `jax.jit` and of `hlo_tools.jit`."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh

import hlo_tools

# `jax.jit` comes first: a test that is wrong about JAX fails there.
JITS = {"jax": jax.jit, "hlo_tools": hlo_tools.jit}


def both(use):
    """`use` of either jit, from one source line so that locations agree."""
    return [use(jit) for jit in JITS.values()]


def mesh(count=4, name="i", **kwargs):
    return Mesh(np.array(jax.devices()[:count]), (name,), **kwargs)


def counted(f):
    """A function that counts how often it is traced, in `.traces`."""

    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        wrapper.traces += 1
        return f(*args, **kwargs)

    wrapper.traces = 0
    return wrapper
