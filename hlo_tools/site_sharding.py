"""Which sites can be called on each device's own part, and on which part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.extend.mlir import ir

from hlo_tools.composites import AttentionSpec
from hlo_tools.matching.axes import Axes
from hlo_tools.matching.canonical import CanonicalSite
from hlo_tools.matching.canonical_grad import CanonicalGradient
from hlo_tools.matching.index_space import Atom, Dim, Index, atoms_of
from hlo_tools.sharding_plan import DimAxes, ShardingPlan, UnshardableSiteError


@dataclass(frozen=True)
class SiteSharding:
    """Mesh axes of each dimension of a site's operands and result.

    Attributes:
      mesh_name: of the program's mesh.
      mesh: its axis names and sizes.
      operands: for each operand of the composite, axes by dimension.
      results: the same for its results.
      inside: axes that constraints between them mention.
    """

    mesh_name: str
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
        match, axes = site.match, site.match.axes
        places = [ir.BlockArgument(value).arg_number for value in site.values]
        splits: dict[Atom, DimAxes] = {}
        for number, operand in enumerate((match.q, match.k, match.v)):
            self._collect(operand.index, self.operands[places[number]], axes, splits)
        self._collect(match.out_index, self.results[0], axes, splits)
        _refuse_other_splits(splits, axes)
        batch = splits.get(axes.batch[0], ()) if axes.batch else ()
        heads = splits.get(axes.kv_heads[0], ()) if axes.kv_heads else ()
        if set(batch) & set(heads):
            raise UnshardableSiteError("batch and heads are split over one mesh axis")
        if extra := self.inside - {*batch, *heads}:
            raise UnshardableSiteError(
                f"the scores are split over mesh axis {', '.join(sorted(extra))}: "
                "sequence-sharded sites are left to XLA"
            )
        for number, index in site.side_values:
            # slicing what every device has moves nothing
            own: dict[Atom, DimAxes] = {}
            self._collect(index, self.operands[places[number]], axes, own)
            for atom, names in own.items():
                if splits.get(atom) != names:
                    raise UnshardableSiteError(
                        f"the {_role(atom, axes)} of a side input is split over "
                        f"{'*'.join(names)}, which that of the queries is not"
                    )
        return self._plan(site.spec, batch, heads)

    def _plan(self, spec: AttentionSpec, batch: DimAxes, heads: DimAxes):
        b, h = (math.prod(self.mesh[a] for a in names) for names in (batch, heads))
        sides = tuple(
            replace(side, shape=_local(side.shape, b, h)) for side in spec.sides
        )
        local = replace(
            spec, batch=spec.batch // b, kv_heads=spec.kv_heads // h, sides=sides
        )
        shapes = tuple(side.shape for side in spec.sides)
        return ShardingPlan(self.mesh_name, self.mesh, batch, heads, local, shapes)

    def check_backward(
        self,
        gradient: CanonicalGradient,
        plan: ShardingPlan,
        dout: int | None,
        order: Sequence[int],
    ) -> None:
        """Checks that a backward pass is split as `plan` splits its forward pass.

        Args:
          gradient: the backward pass; this is the sharding of its composite.
          plan: of the forward pass.
          dout: operand number of the cotangent, if that is an operand.
          order: for each result, the number of the gradient that it is.

        Raises:
          UnshardableSiteError: it is not.
        """
        axes = gradient.site.match.axes
        wanted: dict[Atom, DimAxes] = {}
        for dim, names in ((axes.batch, plan.batch), (axes.kv_heads, plan.heads)):
            if dim and names:
                wanted[dim[0]] = names
        splits: dict[Atom, DimAxes] = {}
        if dout is not None:
            index = gradient.match.dout.index
            self._collect(index, self.operands[dout], axes, splits)
        for number, place in enumerate(order):
            output, own = gradient.match.outputs[place], {}
            self._collect(output.index, self.results[number], axes, own)
            for atom in atoms_of(output.index) & wanted.keys():
                if atom not in own:
                    raise UnshardableSiteError(
                        f"the {_role(atom, axes)} of a gradient is not split over "
                        f"{'*'.join(wanted[atom])}, as it is in the forward pass"
                    )
            splits.update(own)
        for atom, names in splits.items():
            if wanted.get(atom) != names:
                raise UnshardableSiteError(
                    f"the {_role(atom, axes)} is split over {'*'.join(names)} in the "
                    "backward pass, but not in the forward pass"
                )

    def _collect(
        self,
        index: Index,
        dims: Sequence[DimAxes],
        axes: Axes,
        splits: dict[Atom, DimAxes],
    ) -> None:
        """Adds which mesh axes split which atoms of an array."""
        for dim, names in zip(index, dims, strict=True):
            for atom, own in self._spread(dim, names, axes).items():
                if splits.setdefault(atom, own) != own:
                    raise UnshardableSiteError(
                        f"the {_role(atom, axes)} is split over {'*'.join(own)} in one "
                        f"operand and over {'*'.join(splits[atom])} in another"
                    )

    def _spread(self, dim: Dim, names: DimAxes, axes: Axes) -> dict[Atom, DimAxes]:
        """Tells which atoms of a dimension its mesh axes split, from the major one."""
        found: dict[Atom, DimAxes] = {}
        rest = [(atom, atom.size) for atom in dim]
        for name in names:
            if name not in self.mesh:
                raise UnshardableSiteError(f"a dimension is split over part of {name}")
            size = self.mesh[name]
            if size == 1:
                continue
            while rest and rest[0][1] == 1:
                rest.pop(0)
            if not rest or rest[0][1] % size:
                what = f"the {_role(rest[0][0], axes)}" if rest else "a dimension"
                raise UnshardableSiteError(
                    f"{what} can not be split into {size} parts over mesh axis {name}"
                )
            atom, left = rest[0]
            found[atom] = (*found.get(atom, ()), name)
            rest[0] = (atom, left // size)
        return found


_ROLES = {
    "batch": "batch",
    "kv_heads": "number of key-value heads",
    "group": "query head group",
    "rows": "query sequence",
    "keys": "key sequence",
    "depth": "head dimension",
    "value": "value dimension",
}


def _role(atom: Atom, axes: Axes) -> str:
    for field, name in _ROLES.items():
        if atom in getattr(axes, field):
            return f"{name} ({atom.size})"
    return f"axis of size {atom.size}"


def _refuse_other_splits(splits: dict[Atom, DimAxes], axes: Axes) -> None:
    """Refuses splits of anything but the outermost batch and head axes."""
    allowed = {*axes.batch[:1], *axes.kv_heads[:1]}
    for atom, names in splits.items():
        if atom not in allowed:
            raise UnshardableSiteError(
                f"the {_role(atom, axes)} is split over mesh axis {'*'.join(names)}: "
                "such sites are left to XLA"
            )


def _local(shape: tuple[int, ...], b: int, h: int) -> tuple[int, ...]:
    """Returns what one device has of a side input."""
    batch, heads, *rest = shape
    return (batch // b if batch > 1 else 1, heads // h if heads > 1 else 1, *rest)
