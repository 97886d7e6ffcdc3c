"""Arrays whose dimensions are known by their index atoms."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from hlo_tools.matching.index_space import Dim, Index, dim_size


def regroup_array(array, index: Index, groups: Sequence[Dim], shape: Sequence[int]):
    """Returns `array`, whose dims are `index`, with dims `groups`.

    An axis that the array lacks is broadcast if its group has others that the
    array has, and left out (size 1) if it has none.

    Args:
      array: reshaped to one dimension per atom first.
      index: the atoms of each of its dimensions.
      groups: the wanted dimensions.
      shape: sizes of the result; 1 where a group is left out.
    """
    own = [atom for dim in index for atom in dim]
    array = array.reshape([atom.size for atom in own])
    order, full, present = [], [], []
    for group in groups:
        kept = any(atom in own for atom in group)
        for atom in group if kept else ():
            full.append(atom.size)
            present.append(atom in own)
            if atom in own:
                order.append(own.index(atom))
    array = array.transpose(order)
    if not all(present):
        sizes = iter(array.shape)
        array = array.reshape([next(sizes) if here else 1 for here in present])
        array = jnp.broadcast_to(array, full)
    return array.reshape(shape)


def full_array(array, index: Index, groups: Sequence[Dim]):
    """Regroups an operand, broadcasting over every axis that it lacks."""
    own = {atom for dim in index for atom in dim}
    shape = [dim_size(group) if any(a in own for a in group) else 1 for group in groups]
    array = regroup_array(array, index, groups, shape)
    return jnp.broadcast_to(array, [dim_size(group) for group in groups])
