"""Index atoms: how the dimensions of a value relate to the axes of a computation.

Every dimension of every value that a match reads is described by a tuple of
atoms, major to minor: ``()`` for a dimension of size 1 (or one that broadcasting
drops), ``(a,)`` for a plain axis, ``(b, h)`` for two axes merged by a reshape.
Transposes permute the tuples, reshapes regroup the atoms in them.  A reshape
that cuts through an atom asks for the atom to be split, and the reading starts
again with the finer atoms, so no expression ever mixes the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Dim = tuple["Atom", ...]
Index = tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class Atom:
    """One axis of the index space.

    Attributes:
      size: number of positions, at least 2.
      label: what the axis is, for messages ("key", "row0", ...).
      serial: creation order; makes sorting stable.
    """

    size: int
    label: str
    serial: int

    def __repr__(self) -> str:
        return f"{self.label}[{self.size}]"


class SplitAtomError(Exception):
    """A reshape cuts through `atom`, which must become axes of sizes `sizes`."""

    def __init__(self, atom: Atom, sizes: tuple[int, int]):
        super().__init__(f"split {atom!r} into {sizes}")
        self.atom = atom
        self.sizes = sizes


class IncompatibleReshapeError(Exception):
    """A reshape mixes axes in a way that no split can express."""


@dataclass
class IndexSpace:
    """The atoms of one match, and how they have been split so far."""

    _serial: itertools.count = field(default_factory=itertools.count)
    _parts: dict[Atom, tuple[Atom, Atom]] = field(default_factory=dict)

    def new_dim(self, size: int, label: str) -> Dim:
        """Returns the index of a fresh axis: () if its size is 1."""
        if size == 1:
            return ()
        return (Atom(size, label, next(self._serial)),)

    def split(self, error: SplitAtomError) -> None:
        """Records that an atom consists of two finer ones."""
        major, minor = error.sizes
        self._parts[error.atom] = (
            Atom(major, error.atom.label, next(self._serial)),
            Atom(minor, error.atom.label, next(self._serial)),
        )

    def expand(self, dim: Dim) -> Dim:
        """Returns `dim` with every split atom replaced by its parts."""
        if not any(atom in self._parts for atom in dim):
            return dim
        return tuple(
            leaf
            for atom in dim
            for leaf in (
                self.expand(self._parts[atom]) if atom in self._parts else (atom,)
            )
        )


def dim_size(dim: Dim) -> int:
    """Returns the number of positions of a dimension."""
    return math.prod(atom.size for atom in dim)


def atoms_of(index: Sequence[Dim]) -> frozenset[Atom]:
    """Returns the atoms that an index mentions."""
    return frozenset(atom for dim in index for atom in dim)


def regroup(index: Index, shape: Sequence[int]) -> Index:
    """Returns the index of a value of shape `shape` that reshapes to `index`.

    Raises:
      SplitAtomError: a dimension boundary of `shape` falls inside an atom.
      IncompatibleReshapeError: it falls there and the sizes do not divide, or
        the index drops part of the value (a size above 1 read at no atom).
    """
    flat = [atom for dim in index for atom in dim]
    if dim_size(tuple(flat)) != math.prod(shape):
        raise IncompatibleReshapeError("the index does not cover the value")
    result, position = [], 0
    for size in shape:
        dim, covered = [], 1
        while covered < size:
            atom = flat[position]
            missing = size // covered
            if size % covered or missing < atom.size:
                if size % covered or atom.size % missing:
                    raise IncompatibleReshapeError(f"{atom!r} straddles size {size}")
                raise SplitAtomError(atom, (missing, atom.size // missing))
            dim.append(atom)
            covered *= atom.size
            position += 1
        if covered != size:
            raise IncompatibleReshapeError(f"{dim} is not a dimension of size {size}")
        result.append(tuple(dim))
    return tuple(result)
