"""A shard_map around an implementation that leaves every array where it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from hlo_tools.composites import AttentionSpec
from hlo_tools.gradients import GradSpec

DimAxes = tuple[str, ...]


class UnshardableSiteError(Exception):
    """A kernel can not be called under this sharding; the text says why."""


@dataclass(frozen=True)
class ShardingPlan:
    """A shard_map around an implementation.

    Attributes:
      mesh_name: of the program's mesh.
      mesh: its axis names and sizes.
      batch, heads: mesh axes over which those dimensions are split.
      local_spec: the site's semantics on one device.
      side_shapes: global shapes of the side inputs.
    """

    mesh_name: str
    mesh: dict[str, int]
    batch: DimAxes
    heads: DimAxes
    local_spec: AttentionSpec
    side_shapes: tuple[tuple[int, ...], ...]

    @property
    def description(self) -> str:
        """Which dimension is split over which axes, for the report."""
        parts = [("batch", self.batch), ("heads", self.heads)]
        return ", ".join(f"{name}: {'*'.join(axes)}" for name, axes in parts if axes)

    def signature(self) -> str:
        """Returns a text that is equal for plans that one function serves."""
        split = f"batch {self.batch}, heads {self.heads}, sides {self.side_shapes}"
        return f"{self.mesh_name} {self.mesh}: {split}"

    def wrap(self, implementation: Callable) -> Callable:
        """Returns the implementation under shard_map, on global arrays."""
        array = self._array
        return self._shard_map(
            implementation, (array, array, array, *self._sides), array
        )

    @property
    def _array(self) -> P:
        return P(self.batch or None, None, self.heads or None, None)

    @property
    def _sides(self) -> tuple[P, ...]:
        return tuple(
            P(
                (self.batch or None) if shape[0] > 1 else None,
                (self.heads or None) if shape[1] > 1 else None,
                None,
                None,
                None,
            )
            for shape in self.side_shapes
        )

    def _local_shapes(self, arrays) -> list[jax.ShapeDtypeStruct]:
        """Returns what one device gets of q, k, v and the sides."""
        found = []
        specs = (self._array,) * 3 + self._sides
        for array, spec in zip(arrays, specs, strict=True):
            parts = [self._parts(names) for names in spec]
            shape = [n // p for n, p in zip(array.shape, parts, strict=True)]
            found.append(jax.ShapeDtypeStruct(shape, array.dtype))
        return found

    def _parts(self, names: str | DimAxes | None) -> int:
        """Returns into how many parts an entry of a PartitionSpec splits."""
        names = (names,) if isinstance(names, str) else names or ()
        return math.prod(self.mesh[name] for name in names)

    def _shard_map(self, function: Callable, in_specs, out_specs) -> Callable:
        mesh = AbstractMesh(
            tuple(self.mesh.values()),
            tuple(self.mesh),
            axis_types=(AxisType.Auto,) * len(self.mesh),
        )
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def wrap_pair(
        self, forward: Callable, backward: Callable, grad: GradSpec
    ) -> tuple[Callable, Callable]:
        """Returns the halves of an implementation under shard_map."""
        array, sides = self._array, self._sides
        row = P(self.batch or None, self.heads or None, None)

        def forward_half(*arrays):
            residuals = len(jax.eval_shape(forward, *self._local_shapes(arrays))) - 1
            return self._shard_map(
                forward,
                (array, array, array, *sides),
                (array, *[row] * residuals),
            )(*arrays)

        def backward_half(*arrays):
            residuals = len(arrays) - 5 - len(sides)
            specs = (array, array, array, *sides, array, *[row] * residuals, array)
            outs = tuple(
                array if isinstance(name, str) else sides[name] for name in grad.wanted
            )
            return self._shard_map(self._summed(backward, grad), specs, outs)(*arrays)

        return forward_half, backward_half

    def _summed(self, backward: Callable, grad: GradSpec) -> Callable:
        """Adds up gradients of arrays that all devices along an axis share."""

        def summed(*arrays):
            found = []
            gradients = backward(*arrays)
            for name, gradient in zip(grad.wanted, gradients, strict=True):
                shared: tuple[str, ...] = ()
                if isinstance(name, int):
                    shape = self.side_shapes[name]
                    shared += self.batch if shape[0] == 1 else ()
                    shared += self.heads if shape[1] == 1 else ()
                found.append(_psum(gradient, shared) if shared else gradient)
            return tuple(found)

        return summed


def _psum(array, axes: DimAxes):
    # Without dimensions of size 1: the shape that the original program adds up.
    whole = array.shape
    array = array.reshape([size for size in whole if size > 1])
    return jax.lax.psum(array, axes).reshape(whole)
