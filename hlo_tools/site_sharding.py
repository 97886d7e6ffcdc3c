"""How a site's operands are sharded, and a shard_map that keeps it that way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from hlo_tools.composites import AttentionSpec
from hlo_tools.gradients import GradSpec
from hlo_tools.inlining import inline_composites
from hlo_tools.matching.canonical import CanonicalSite
from hlo_tools.matching.canonical_grad import CanonicalGradient
from hlo_tools.matching.index_space import Atom, Dim, Index
from hlo_tools.module import StableHloModule

_MARK = "hlo_tools.site_operands"
DimAxes = tuple[str, ...]


class UnshardableSiteError(Exception):
    """A kernel can not be called under this sharding; the text says why."""


@dataclass(frozen=True)
class ShardingPlan:
    """A shard_map around an implementation.

    Attributes:
      mesh: axis names and sizes.
      batch, heads: mesh axes over which those dimensions are split.
      local_spec: the site's semantics on one device.
      side_shapes: global shapes of the side inputs.
    """

    mesh: dict[str, int]
    batch: DimAxes
    heads: DimAxes
    local_spec: AttentionSpec
    side_shapes: tuple[tuple[int, ...], ...]

    @property
    def description(self) -> str:
        parts = [("batch", self.batch), ("heads", self.heads)]
        return ", ".join(f"{name}: {'*'.join(axes)}" for name, axes in parts if axes)

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
            parts = [
                math.prod(self.mesh[name] for name in names or ()) for names in spec
            ]
            shape = [n // p for n, p in zip(array.shape, parts, strict=True)]
            found.append(jax.ShapeDtypeStruct(shape, array.dtype))
        return found

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
                found.append(jax.lax.psum(gradient, shared) if shared else gradient)
            return tuple(found)

        return summed


@dataclass(frozen=True)
class SiteSharding:
    """Mesh axes of each dimension of a site's operands and result.

    Attributes:
      mesh: axis names and sizes.
      operands: for each operand of the composite, axes by dimension.
      results: the same for its results.
      inside: axes that constraints between them mention.
    """

    mesh: dict[str, int]
    operands: tuple[tuple[DimAxes, ...], ...]
    results: tuple[tuple[DimAxes, ...], ...]
    inside: frozenset[str]

    def plan(self, site: CanonicalSite) -> ShardingPlan:
        """Returns how to call an implementation without moving data.

        Raises:
          UnshardableSiteError: the sequence or a feature dimension is split, or
            the operands are not split alike.
        """
        match, spec = site.match, site.spec
        places = [ir.BlockArgument(value).arg_number for value in site.values]
        indices = [match.q.index, match.k.index, match.v.index]
        splits: dict[Atom, DimAxes] = {}
        for index, place in zip(indices, places, strict=False):
            self._collect(index, self.operands[place], splits)
        self._collect(match.out_index, self.results[0], splits)
        axes = match.axes
        self._only(splits, axes)
        batch = self._group_axes(splits, axes.batch, "batch")
        heads = self._group_axes(splits, axes.kv_heads, "heads")
        used = {*batch, *heads}
        if set(batch) & set(heads):
            raise UnshardableSiteError("batch and heads are split over one mesh axis")
        if not self.inside <= used:
            names = ", ".join(sorted(self.inside - used))
            raise UnshardableSiteError(
                f"the scores are split over mesh axis {names}: sequence-sharded sites "
                "are left to XLA"
            )
        b, h = (math.prod(self.mesh[a] for a in names) for names in (batch, heads))
        shapes = tuple(side.shape for side in spec.sides)
        local = replace(
            spec,
            batch=spec.batch // b,
            kv_heads=spec.kv_heads // h,
            sides=tuple(
                replace(side, shape=_local(side.shape, b, h)) for side in spec.sides
            ),
        )
        return ShardingPlan(self.mesh, batch, heads, local, shapes)

    def check_backward(
        self, gradient: CanonicalGradient, plan: ShardingPlan, places: Sequence
    ) -> None:
        """Checks that a backward pass is split as `plan` splits its forward pass.

        Args:
          gradient: the backward pass; this is the sharding of its composite.
          plan: of the forward pass.
          places: (operand number of the cotangent or None, for each result the
            number of its gradient).

        Raises:
          UnshardableSiteError: it is not.
        """
        axes = gradient.site.match.axes
        wanted: dict[Atom, DimAxes] = {}
        for dim, names in ((axes.batch, plan.batch), (axes.kv_heads, plan.heads)):
            if dim and names:
                wanted[dim[0]] = names
        dout, order = places
        splits: dict[Atom, DimAxes] = {}
        if dout is not None:
            self._collect(gradient.match.dout.index, self.operands[dout], splits)
        for number, place in enumerate(order):
            output = gradient.match.outputs[place]
            self._collect(output.index, self.results[number], splits)
            own = {atom for dim in output.index for atom in dim}
            for atom, names in wanted.items():
                if atom in own and splits.get(atom) != names:
                    raise UnshardableSiteError(
                        f"its gradients are not split over {'*'.join(names)} as it is"
                    )
        for atom, names in splits.items():
            if wanted.get(atom) != names:
                raise UnshardableSiteError(
                    f"its backward pass is split over {'*'.join(names)}, which its "
                    "forward pass is not"
                )

    def _collect(
        self, index: Index, dims: Sequence[DimAxes], splits: dict[Atom, DimAxes]
    ) -> None:
        for dim, names in zip(index, dims, strict=True):
            if not names:
                continue
            if not all(name in self.mesh for name in names):
                raise UnshardableSiteError(f"a dimension is split over part of {names}")
            parts = math.prod(self.mesh[name] for name in names)
            if not dim or dim[0].size % parts:
                raise UnshardableSiteError(
                    f"a dimension is split into {parts} parts that do not align with "
                    "its axes"
                )
            if splits.setdefault(dim[0], names) != names:
                raise UnshardableSiteError(
                    f"one axis is split over {names} in one operand and over "
                    f"{splits[dim[0]]} in another"
                )

    def _only(self, splits: dict[Atom, DimAxes], axes) -> None:
        for role, dim in (
            ("query sequence", axes.rows),
            ("key sequence", axes.keys),
            ("head dimension", axes.depth),
            ("value dimension", axes.value),
            ("query head group", axes.group),
        ):
            for atom in dim:
                if atom in splits:
                    raise UnshardableSiteError(
                        f"the {role} is split over mesh axis "
                        f"{'*'.join(splits[atom])}: such sites are left to XLA"
                    )

    def _group_axes(
        self, splits: dict[Atom, DimAxes], group: Dim, name: str
    ) -> DimAxes:
        if any(atom in splits for atom in group[1:]):
            raise UnshardableSiteError(f"the {name} are split along a minor axis")
        return splits.get(group[0], ()) if group else ()


def _local(shape: tuple[int, ...], b: int, h: int) -> tuple[int, ...]:
    batch, heads, *rest = shape
    return (batch // b if batch > 1 else 1, heads // h if heads > 1 else 1, *rest)


def meshes(module: StableHloModule) -> dict[str, dict[str, int]]:
    """Returns the module's meshes: name -> axis name -> size."""
    found = {}
    for op in module.module.body.operations:
        if op.operation.name == "sdy.mesh":
            mesh = sdy.MeshAttr(op.attributes["mesh"])
            axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
            name = ir.StringAttr(op.attributes["sym_name"]).value
            found[name] = {axis.name: axis.size for axis in axes}
    return found


def _partitions(module: StableHloModule) -> int:
    attributes = module.module.operation.attributes
    if "mhlo.num_partitions" not in attributes:
        return 1
    return ir.IntegerAttr(attributes["mhlo.num_partitions"]).value


def _is_fully_manual(op: ir.Operation, mesh: dict[str, int]) -> bool:
    """Returns whether `op` already runs on one device's part of everything."""
    names: set[str] = set()
    parent = op.parent
    while parent is not None:
        if parent.operation.name == "sdy.manual_computation":
            axes = sdy.ManualAxesAttr(parent.operation.attributes["manual_axes"])
            names |= {axes[number] for number in range(len(axes))}
        parent = parent.operation.parent
    return all(size == 1 or name in names for name, size in mesh.items())


def site_shardings(
    module: StableHloModule, composites: Sequence[ir.Operation]
) -> list[SiteSharding | UnshardableSiteError | None]:
    """Returns how each site is sharded; None where it runs on one device.

    Shardings are propagated on a copy with every site inlined, so they are what
    the original program would get.
    """
    found = meshes(module)
    sharded = {n: m for n, m in found.items() if math.prod(m.values()) > 1}
    if not sharded:
        if _partitions(module) == 1:
            return [None] * len(composites)
        error = UnshardableSiteError(
            "the module is partitioned without a Shardy mesh (GSPMD)"
        )
        return [error for _ in composites]
    result: list[SiteSharding | UnshardableSiteError | None] = []
    propagated = _propagate(module, len(composites))
    for op, read in zip(composites, propagated, strict=True):
        mesh_name, operands, outs, inside = read
        mesh = sharded.get(mesh_name or next(iter(sharded)))
        if mesh is None or len(sharded) > 1:
            result.append(UnshardableSiteError("the module has several meshes"))
        elif _is_fully_manual(op, mesh):
            result.append(None)
        elif _inside_manual(op):
            result.append(
                UnshardableSiteError("it stands in a partly manual shard_map")
            )
        else:
            result.append(SiteSharding(mesh, operands, outs, inside))
    return result


def _inside_manual(op: ir.Operation) -> bool:
    parent = op.parent
    while parent is not None:
        if parent.operation.name == "sdy.manual_computation":
            return True
        parent = parent.operation.parent
    return False


def _propagate(module: StableHloModule, count: int):
    """Returns (mesh name, operand axes, result axes, inner axes) for each site."""
    copy = module.clone()
    functions = copy.functions()
    inside = []
    composites = [
        op
        for op in copy.walk("stablehlo.composite")
        if ir.StringAttr(op.attributes["name"]).value.startswith("hlo_tools.")
    ]
    assert len(composites) == count
    for number, op in enumerate(composites):
        function = functions[ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value]
        inside.append(_constraint_axes(function))
        with ir.InsertionPoint(op), op.location:
            before = stablehlo.OptimizationBarrierOp(list(op.operands))
        before.attributes[_MARK] = ir.StringAttr.get(f"{number}.in")
        for place in range(len(op.operands)):
            op.operands[place] = before.results[place]
        with ir.InsertionPoint.after(op), op.location:
            after = stablehlo.OptimizationBarrierOp(list(op.results))
        after.attributes[_MARK] = ir.StringAttr.get(f"{number}.out")
        for old, new in zip(op.results, after.results, strict=True):
            old.replace_all_uses_except(new, after.operation)
    inline_composites(copy, lambda op: True)
    passmanager.PassManager.parse(
        "builtin.module(symbol-dce,sdy-propagation-pipeline)"
    ).run(copy.module.operation)
    marked = {
        ir.StringAttr(op.attributes[_MARK]).value: op
        for op in copy.walk("stablehlo.optimization_barrier")
        if _MARK in op.attributes
    }
    result = []
    for number in range(count):
        mesh, operands = _axes_of(marked[f"{number}.in"])
        mesh_out, outs = _axes_of(marked[f"{number}.out"])
        result.append((mesh or mesh_out, operands, outs, inside[number]))
    return result


def _axes_of(op: ir.Operation) -> tuple[str | None, tuple]:
    ranks = [len(ir.RankedTensorType(r.type).shape) for r in op.results]
    if "sdy.sharding" not in op.attributes:
        return None, tuple(((),) * rank for rank in ranks)
    shardings = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"]).shardings
    mesh, result = None, []
    for sharding in (sdy.TensorShardingAttr(s) for s in shardings):
        dims = [sdy.DimensionShardingAttr(dim) for dim in sharding.dimension_shardings]
        result.append(tuple(_names(dim) for dim in dims))
        mesh = str(sharding.mesh_or_ref).lstrip("@").strip('"')
    return mesh, tuple(result)


def _names(dim) -> DimAxes:
    names = []
    for axis in (sdy.AxisRefAttr(a) for a in dim.axes):
        sub = "" if axis.sub_axis_info is None else f":{axis.sub_axis_info}"
        names.append(axis.name + sub)
    return tuple(names)


def _constraint_axes(function: ir.OpView) -> frozenset[str]:
    axes: set[str] = set()

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "sdy.sharding_constraint":
            sharding = sdy.TensorShardingAttr(op.attributes["sharding"])
            for dim in sharding.dimension_shardings:
                axes.update(_names(sdy.DimensionShardingAttr(dim)))
        return ir.WalkResult.ADVANCE

    function.operation.walk(visit)
    return frozenset(axes)
