"""Reads how a module's sites are sharded, after propagation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

from hlo_tools.inlining import inline_composites
from hlo_tools.module import StableHloModule
from hlo_tools.sharding_plan import DimAxes, UnshardableSiteError
from hlo_tools.site_sharding import SiteSharding

_MARK = "hlo_tools.site_operands"


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
        if module.partitions == 1:
            return [None] * len(composites)
        error = UnshardableSiteError(
            "the module is partitioned without a Shardy mesh (GSPMD)"
        )
        return [error for _ in composites]
    result: list[SiteSharding | UnshardableSiteError | None] = []
    propagated = _propagate(module, len(composites))
    for op, read in zip(composites, propagated, strict=True):
        mesh_name, operands, outs, inside = read
        mesh_name = mesh_name or next(iter(sharded))
        mesh = sharded.get(mesh_name)
        if mesh is None or len(sharded) > 1:
            result.append(UnshardableSiteError("the module has several meshes"))
        elif _is_fully_manual(op, mesh):
            result.append(None)
        elif _inside_manual(op):
            result.append(
                UnshardableSiteError("it stands in a partly manual shard_map")
            )
        else:
            result.append(SiteSharding(mesh_name, mesh, operands, outs, inside))
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
