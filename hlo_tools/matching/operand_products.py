"""Reads the products of a site's backward pass in the site's own axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hlo_tools.matching.index_space import (
    Dim,
    Index,
    atoms_of,
    dim_size,
)
from hlo_tools.matching.operands import (
    trail,
    unify,
)
from hlo_tools.matching.products import DotDims
from hlo_tools.matching.reader import (
    shape_of,
)
from hlo_tools.matching.twins import TwinHops

if TYPE_CHECKING:
    from hlo_tools.matching.attention import Attempt, AttentionMatch


class SiteProducts:
    """Tells what the operands of products are, in terms of a site.

    Args:
      attempt: the match of the site, with its reader.
      match: the site.
    """

    def __init__(self, attempt: Attempt, match: AttentionMatch):
        self.attempt, self.match = attempt, match
        self.space, self.reader = attempt.space, attempt.reader
        self.hops = TwinHops()
        axes = match.axes
        self.keys, self.value = axes.keys, axes.value
        self.all_atoms = frozenset(
            atom
            for dim in (axes.batch, axes.kv_heads, axes.group, axes.rows, axes.keys)
            for atom in dim
        )
        self.targets = {
            name: trail(self.reader, operand.value, operand.index, self.hops.origin)
            for name, operand in (("q", match.q), ("k", match.k), ("v", match.v))
        }

    def _operand_indices(self, op, dims: DotDims, result: Index):
        """Returns the indices of a product's operands; contracted dims are fresh."""
        shapes = [shape_of(operand) for operand in op.operands]
        index: list[list[Dim]] = [[()] * len(shape) for shape in shapes]
        rest = iter(result)
        for left, right in zip(*dims.batch, strict=True):
            index[0][left] = index[1][right] = next(rest)
        for number in (0, 1):
            for dim in dims.free(number, len(shapes[number])):
                index[number][dim] = next(rest)
        fresh: set = set()
        for left, right in zip(*dims.contract, strict=True):
            dim = self._fresh(op, 0, left, shapes[0][left])
            fresh |= set(dim)
            index[0][left] = index[1][right] = dim
        return [tuple(one) for one in index], fresh

    def _fresh(self, op, number: int, dim: int, size: int) -> Dim:
        return self.space.expand(self.attempt.named_dim(op, number, dim, size))

    def _same(self, value, index: Index, name: str, fresh: set):
        """Returns (step, names of fresh atoms, scale) if an operand is the site's."""
        own = trail(self.reader, value, index, self.hops.origin)
        for step in own:
            for target in self.targets[name]:
                if step.value != target.value:
                    continue
                names = unify(step.index, target.index, fresh)
                if names is not None and fresh & atoms_of(step.index) <= names.keys():
                    return step, names, step.scale / target.scale
        return None

    def _other_index(self, op, dims: DotDims, number: int, index: Index):
        """Returns the index of the other operand; its free dims are fresh."""
        shape = shape_of(op.operands[1 - number])
        other: list[Dim] = [()] * len(shape)
        for pairs in (dims.batch, dims.contract):
            for ours, theirs in zip(pairs[number], pairs[1 - number], strict=True):
                other[theirs] = index[ours]
        fresh: set = set()
        for dim in dims.free(1 - number, len(shape)):
            other[dim] = self._fresh(op, 1 - number, dim, shape[dim])
            fresh |= set(other[dim])
        return tuple(other), fresh

    def _result_index(self, op, dims: DotDims, number, index, other) -> Index:
        sides = [index, other] if number == 0 else [other, index]
        found = [sides[0][d] for d in dims.batch[0]]
        for side in (0, 1):
            free = dims.free(side, len(shape_of(op.operands[side])))
            found.extend(sides[side][d] for d in free)
        return tuple(found)


def unify_sizes(fresh: list, known: Dim):
    """Names fresh atoms, in order, after the atoms of a dimension.

    Raises:
      SplitAtomError: one of them stands for several.
    """
    if dim_size(tuple(fresh)) != dim_size(known):
        return None
    return unify((tuple(fresh),), (known,), set(fresh))
