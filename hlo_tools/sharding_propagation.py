"""Reads how a module's sites are sharded, after propagation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

from hlo_tools.inlining import inline_composites
from hlo_tools.matching.reader import shape_of
from hlo_tools.module import StableHloModule
from hlo_tools.sharding_plan import DimAxes, UnshardableSiteError
from hlo_tools.site_sharding import SiteSharding

_NUMBER = "hlo_tools.number"
_BORDER = "hlo_tools.border"
_SHARDING = "sdy.sharding"
_ENDS = ("operands", "results")


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
    if len(sharded) > 1:
        error = UnshardableSiteError("the module has several meshes")
        return [error for _ in composites]
    ((mesh_name, mesh),) = sharded.items()
    result: list[SiteSharding | UnshardableSiteError | None] = []
    free = [number for number, op in enumerate(composites) if not _inside_manual(op)]
    original = _Propagated(module, len(composites))
    pinned = _Propagated(module, len(composites), mesh_name, original, free)
    for number, op in enumerate(composites):
        if _is_fully_manual(op, mesh):
            result.append(None)
        elif number not in free:
            result.append(
                UnshardableSiteError("it stands in a partly manual shard_map")
            )
        elif original.shardings != pinned.shardings:
            result.append(
                UnshardableSiteError(
                    "XLA has to choose between conflicting shardings in this program, "
                    "and would choose others next to a kernel; a sharding constraint "
                    "on the activations settles it"
                )
            )
        else:
            result.append(original.site(number, mesh_name, mesh))
    return result


def _inside_manual(op: ir.Operation) -> bool:
    parent = op.parent
    while parent is not None:
        if parent.operation.name == "sdy.manual_computation":
            return True
        parent = parent.operation.parent
    return False


class _Propagated:
    """A copy of a module after propagation.

    Args:
      module: not changed.
      count: how many sites it has.
      mesh_name: of its mesh.
      original, pinned: the sites to put in as unknown operations, sharded at their
        borders as in `original`; all others are inlined.

    Attributes:
      shardings: of the results of each operation outside of the sites, by number.
    """

    def __init__(
        self,
        module: StableHloModule,
        count: int,
        mesh_name: str = "",
        original: _Propagated | None = None,
        pinned: Sequence[int] = (),
    ):
        copy = module.clone()
        composites = [
            op
            for op in copy.walk("stablehlo.composite")
            if ir.StringAttr(op.attributes["name"]).value.startswith("hlo_tools.")
        ]
        assert len(composites) == count
        functions = copy.functions()
        self.inside = [
            _constraint_axes(functions[_decomposition(op)]) for op in composites
        ]
        _number_operations(copy, {_decomposition(op) for op in composites})
        for number, op in enumerate(composites):
            _add_borders(op, number)
            if number in pinned:
                assert original is not None
                _pin(op, number, mesh_name, original)
        inline_composites(copy, lambda op: True)
        _as_xla_reads_it(copy)
        passmanager.PassManager.parse(
            "builtin.module(symbol-dce,sdy-propagation-pipeline)"
        ).run(copy.module.operation)
        self.shardings: dict[int, tuple] = {}
        self.borders: dict[str, tuple] = {}
        self.attributes: dict[str, ir.Attribute] = {}
        for op in copy.walk():
            if _BORDER in op.attributes:
                name = ir.StringAttr(op.attributes[_BORDER]).value
                self.borders[name] = _axes_of(op)
                if _SHARDING in op.attributes:
                    self.attributes[name] = op.attributes[_SHARDING]
            elif _NUMBER in op.attributes:
                number = ir.IntegerAttr(op.attributes[_NUMBER]).value
                self.shardings[number] = _axes_of(op)

    def site(self, number: int, mesh_name: str, mesh: dict[str, int]) -> SiteSharding:
        """Returns how one site is sharded."""
        operands, results = (self.borders[f"{number}.{end}"] for end in _ENDS)
        return SiteSharding(mesh_name, mesh, operands, results, self.inside[number])


def _decomposition(composite: ir.Operation) -> str:
    return ir.FlatSymbolRefAttr(composite.attributes["decomposition"]).value


def _number_operations(module: StableHloModule, decompositions: set[str]) -> None:
    """Numbers the operations with ranked results outside of the decompositions."""
    kind, number = ir.IntegerType.get_signless(64, module.context), 0
    for name, function in module.functions().items():
        if name in decompositions:
            continue

        def visit(op: ir.Operation) -> ir.WalkResult:
            nonlocal number
            results = op.name.startswith("stablehlo.") and len(op.results)
            if results and op.name != "stablehlo.composite":
                op.attributes[_NUMBER] = ir.IntegerAttr.get(kind, number)
                number += 1
            return ir.WalkResult.ADVANCE

        function.operation.walk(visit)


def _add_borders(op: ir.Operation, number: int) -> None:
    """Puts a marked operation before and after a site."""
    first, second = (ir.StringAttr.get(f"{number}.{end}", op.context) for end in _ENDS)
    with ir.InsertionPoint(op), op.location:
        before = stablehlo.OptimizationBarrierOp(list(op.operands))
    before.attributes[_BORDER] = first
    for place in range(len(op.operands)):
        op.operands[place] = before.results[place]
    with ir.InsertionPoint.after(op), op.location:
        after = stablehlo.OptimizationBarrierOp(list(op.results))
    after.attributes[_BORDER] = second
    for old, new in zip(op.results, after.results, strict=True):
        old.replace_all_uses_except(new, after.operation)


def _pin(op: ir.Operation, number: int, mesh_name: str, original: _Propagated) -> None:
    """Replaces a site by an unknown operation with the shardings of `original`."""
    before = op.operands[0].owner
    with ir.InsertionPoint(op), op.location:
        unknown = stablehlo.CustomCallOp(
            [result.type for result in op.results], list(op.operands), "hlo_tools.site"
        )
    for end, pinned in zip(_ENDS, (before, unknown.operation), strict=True):
        sharding = original.attributes.get(f"{number}.{end}")
        pinned.attributes[_SHARDING] = sharding or _unsplit(pinned, mesh_name)
    for old, new in zip(op.results, unknown.results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


def _unsplit(op: ir.Operation, mesh_name: str) -> ir.Attribute:
    """Returns the sharding of results that every device has whole."""
    shardings = []
    for result in op.results:
        dims = [sdy.DimensionShardingAttr.get([], True) for _ in shape_of(result)]
        shardings.append(sdy.TensorShardingAttr.get(mesh_name, dims))
    return sdy.TensorShardingPerValueAttr.get(shardings)


def _as_xla_reads_it(module: StableHloModule) -> None:
    """Writes broadcasts that only add dimensions of size 1 as reshapes.

    XLA does so before it propagates, and the order in which shardings reach an
    operation is not the same for the two.
    """
    for op in module.walk("stablehlo.broadcast_in_dim"):
        dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
        before, after = shape_of(op.operands[0]), shape_of(op.results[0])
        if dims == sorted(dims) and math.prod(before) == math.prod(after):
            with ir.InsertionPoint(op), op.location:
                new = stablehlo.ReshapeOp(op.results[0].type, op.operands[0])
            for name in op.attributes:
                if name != "broadcast_dimensions":
                    new.attributes[name] = op.attributes[name]
            op.results[0].replace_all_uses_with(new.result)
            op.erase()


def _axes_of(op: ir.Operation) -> tuple[tuple[DimAxes, ...], ...]:
    """Returns which mesh axes split each dimension of each result."""
    if _SHARDING not in op.attributes:
        return tuple(((),) * len(shape_of(result)) for result in op.results)
    shardings = sdy.TensorShardingPerValueAttr(op.attributes[_SHARDING]).shardings
    result = []
    for one in shardings:
        dims = sdy.TensorShardingAttr(one).dimension_shardings
        result.append(tuple(_names(sdy.DimensionShardingAttr(dim)) for dim in dims))
    return tuple(result)


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
