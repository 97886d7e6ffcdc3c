"""Recognizes softmax(f(q.k)) v at a value product."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hlo_tools.matching import masks
from hlo_tools.matching.axes import Axes, find_axes
from hlo_tools.matching.expressions import Builder, Expr, is_float
from hlo_tools.matching.gradient import GradMatch, match_gradients
from hlo_tools.matching.index_space import (
    Dim,
    Index,
    IndexSpace,
    SplitAtomError,
    atoms_of,
)
from hlo_tools.matching.operands import Operand, peel
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.products import (
    DotDims,
    has_plain_algorithm,
    require_first_product,
)
from hlo_tools.matching.reader import (
    ELEMENTWISE,
    SHAPE_OPS,
    Reader,
    defining_op,
    dtype_of,
    is_static,
    loop_invariant,
    result_index,
    shape_of,
)
from hlo_tools.matching.scores import Scores
from hlo_tools.matching.side_gradients import CutError
from hlo_tools.matching.softmax import Softmax, is_sum_of, match_softmax
from hlo_tools.matching.visibility import name_pieces, require_visible_keys


@dataclass
class AttentionMatch:
    """One proven site.

    Attributes:
      out: the value that the site computes; its dims are `out_index`.
      score_product, value_product: the two dot_general operations.
      q, k, v: the operands.
      sides: other arrays that the scores depend on: (value, index).
      scores: argument of the softmax, a function of `score`.
      score: the node of the score product.
      pieces: the scores taken apart.
      uniform_rows: a row without visible keys averages all values.
      band: what the masks of positions alone let through, merged.
      data_masks: the masks that depend on data.
      rows_never_empty: proven that every query sees a key.
      guarded: the pieces hold only where every query sees a key.
      gradients: the backward passes of the site.
      unproven: (operation, reason) where they are no gradients of it, if anywhere.
      axes: the index atoms by role.
      members: the values that belong to the site.
    """

    out: object
    out_index: Index
    score_product: object
    value_product: object
    q: Operand
    k: Operand
    v: Operand
    sides: list[tuple[object, Index]]
    scores: Expr
    score: Expr
    softmax_dtype: str
    probs_dtype: str
    pieces: Scores
    axes: Axes
    members: set
    band: masks.Band | None = None
    data_masks: list[Expr] = field(default_factory=list)
    rows_never_empty: bool = False
    guarded: bool = False
    gradients: list[GradMatch] = field(default_factory=list)
    unproven: tuple[Any, str] | None = None


def match_attention(dot, side: int, exponential) -> AttentionMatch:
    """Proves that `dot` is the value product of an attention.

    Args:
      dot: a dot_general operation.
      side: which of its operands holds the probabilities.
      exponential: the operation that they come from.

    Raises:
      NoMatchError: with the reason.
    """
    if not all(is_static(value) for value in (*dot.operands, *dot.results)):
        raise NoMatchError("dynamic shapes")
    if not has_plain_algorithm(dot):
        raise NoMatchError(
            "the value product asks for a special dot algorithm",
            value=dot.results[0],
            got=str(dot.attributes["algorithm"]),
            expected="one multiplication in the operands' type, summed in float32",
            edit="drop the dot algorithm (preset) of the value product",
        )
    attempt = Attempt(dot, side)
    for _ in range(64):
        try:
            match = attempt.run()
            require_first_product(dot, side, exponential)
            match.gradients = match_gradients(attempt, match)
            return match
        except SplitAtomError as error:
            attempt.space.split(error)
        except CutError as error:
            attempt.cuts.append(error.value)
        except NoMatchError:
            if not attempt.cuts:
                raise
            attempt.uncut.add(attempt.cuts.pop())
    raise NoMatchError("reshapes cut the axes into too many pieces")


class Attempt:
    """One value product; `run` starts afresh after each split of an atom."""

    def __init__(self, dot, side: int):
        self.dot, self.side = dot, side
        self.space = IndexSpace()
        self.dims = DotDims.of(dot)
        self._named_dims: dict = {}  # kept across runs, as the atoms are
        self.cuts: list = []  # values of the scores that are taken as operands
        self.uncut: set = set()  # those that can not be
        self.shapes = [shape_of(operand) for operand in dot.operands]
        self.index: list[list[Dim]] = [[()] * len(shape) for shape in self.shapes]
        self._name_dims()

    def _name_dims(self) -> None:
        p, v = self.side, 1 - self.side
        for label, pairs in (("batch", self.dims.batch), ("key", self.dims.contract)):
            for ours, theirs in zip(pairs[p], pairs[v], strict=True):
                dim = self.space.new_dim(self.shapes[p][ours], label)
                self.index[p][ours] = self.index[v][theirs] = dim
        for number, label in ((p, "row"), (v, "value")):
            for dim in self.dims.free(number, len(self.shapes[number])):
                size = self.shapes[number][dim]
                self.index[number][dim] = self.space.new_dim(size, label)

    def _expanded(self, number: int) -> Index:
        return tuple(self.space.expand(dim) for dim in self.index[number])

    def run(self) -> AttentionMatch:
        p, v = self.side, 1 - self.side
        p_index, v_index = self._expanded(p), self._expanded(v)
        self.keys: Dim = tuple(
            a for d in sorted(self.dims.contract[p]) for a in p_index[d]
        )
        free = self.dims.free(p, len(p_index))
        self.rows = frozenset(a for d in free for a in p_index[d])
        self.value_dims: Dim = tuple(
            a for d in self.dims.free(v, len(v_index)) for a in v_index[d]
        )
        if not self.keys:
            raise NoMatchError("the value product contracts nothing")
        self.builder = Builder()
        self._positions_only: dict = {}
        self.reader = Reader(self.space, self.builder, self._stop)
        probabilities = self.reader.read(self.dot.operands[p], p_index)
        try:
            softmax = match_softmax(self.reader, probabilities, self.keys)
        except NoMatchError as error:
            raise self._judged(error, probabilities) from None
        self._only_one_chain(probabilities)
        score = self._find_score(softmax.scores)
        return self._assemble(softmax, score, p_index, v_index)

    def _judged(self, error: NoMatchError, probabilities: Expr) -> NoMatchError:
        """Only a softmax of one product of queries and keys is a near miss."""
        dots = [node for node in probabilities.walk() if node.kind == "dot"]
        error.near &= len(dots) == 1 and self._operands_of(dots[0]) is not None
        if error.value is None:
            error.value = self.dot.operands[self.side]
        return error

    def _stop(self, value, index: Index) -> bool:
        """Leaves are arrays that do not span queries and keys."""
        if value in self.cuts:
            return True
        atoms = atoms_of(index)
        spans = bool(atoms & set(self.keys)) and (
            not self.rows or bool(atoms & self.rows)
        )
        return not spans and not self._is_positions_only(value)

    def _is_positions_only(self, value, depth: int = 0) -> bool:
        """Returns whether a value is computed from iotas and constants alone."""
        value = loop_invariant(value)
        found = self._positions_only.get(value)
        if found is None:
            op = defining_op(value)
            found = op is not None and depth < 64
            if found:
                name = op.operation.name
                found = name in ("stablehlo.iota", "stablehlo.constant")
                if not found and (name in ELEMENTWISE or name in SHAPE_OPS):
                    found = all(
                        self._is_positions_only(operand, depth + 1)
                        for operand in op.operands
                    )
            self._positions_only[value] = found
        return found

    def _only_one_chain(self, probabilities: Expr) -> None:
        dots = {n.value for n in probabilities.walk() if n.kind == "dot"}
        indices = {n.index for n in probabilities.walk() if n.kind == "dot"}
        if len(dots) < len(indices) and len(dots) == 1:
            raise NoMatchError(
                "one score product is read at two different places", near=True,
                value=next(iter(dots)), got="shifted or transposed scores",
                expected="each score used where it stands",
                edit="do not mix scores of different positions",
            )  # fmt: skip

    def _find_score(self, scores: Expr) -> Expr:
        """Returns the dot node that is a product of queries and keys."""
        dots = [node for node in scores.walk() if node.kind == "dot"]
        for node in sorted(dots, key=lambda n: n.serial):
            if self._operands_of(node) is not None:
                return node
        if dots:
            raise NoMatchError(
                "the softmax's argument holds no product of queries and keys",
                value=dots[0].value,
            )
        raise NoMatchError("the softmax's argument holds no product")

    def _operands_of(self, node: Expr) -> Any:
        """Returns ((q value, index), (k value, index), depth) or None."""
        op = defining_op(node.value)
        if not has_plain_algorithm(op) or not is_float(dtype_of(node.value)):
            return None
        dims = DotDims.of(op)
        shapes = [shape_of(operand) for operand in op.operands]
        index: list[list[Dim]] = [[()] * len(shape) for shape in shapes]
        result = iter(node.index)
        for left, right in zip(*dims.batch, strict=True):
            index[0][left] = index[1][right] = next(result)
        for number in (0, 1):
            for dim in dims.free(number, len(shapes[number])):
                index[number][dim] = next(result)
        depth: list = []
        for left, right in zip(*dims.contract, strict=True):
            atoms = self.space.expand(self.named_dim(op, 0, left, shapes[0][left]))
            index[0][left] = index[1][right] = atoms
            depth.extend(atoms)
        keys = set(self.keys)
        with_keys = [keys & atoms_of(tuple(i)) for i in index]
        for k in (0, 1):
            if with_keys[k] == keys and not with_keys[1 - k]:
                q_side, k_side = ((op.operands[n], tuple(index[n])) for n in (1 - k, k))
                return q_side, k_side, tuple(depth)
        return None

    def named_dim(self, op, number: int, dim: int, size: int) -> Dim:
        """Returns the atoms of an operand's dim that the site does not name."""
        key = (op.results[0], number, dim)
        if key not in self._named_dims:
            self._named_dims[key] = self.space.new_dim(size, "depth")
        return self._named_dims[key]

    def _assemble(
        self, softmax: Softmax, score: Expr, p_index: Index, v_index: Index
    ) -> AttentionMatch:
        q_side, k_side, depth = self._operands_of(score)
        q = peel(self.reader, *q_side, scales=True)
        k = peel(self.reader, *k_side, scales=True)
        v_value = self.dot.operands[1 - self.side]
        v = peel(self.reader, v_value, v_index, scales=False)
        if not self._same_batch(k, v, depth):
            # heads repeated in one of them only: take both as they are multiplied
            k, v = Operand(*k_side), Operand(v_value, v_index)
        sides = self._sides(softmax.scores, score)
        out, out_index, normalizing = self._output(softmax, p_index, v_index)
        axes = find_axes(
            q, k, v, depth, self.keys, self.value_dims, p_index, softmax.scores, sides
        )
        match = AttentionMatch(
            out=out,
            out_index=out_index,
            score_product=defining_op(score.value),
            value_product=self.dot,
            q=q,
            k=k,
            v=v,
            sides=sides,
            scores=softmax.scores,
            score=score,
            softmax_dtype=softmax.exponential.dtype,
            probs_dtype=dtype_of(self.dot.operands[self.side]),
            pieces=Scores(),
            axes=axes,
            members=set(),
        )
        match.members = {
            *self.reader.expanded, *q.between, *k.between, *v.between,
            self.dot.results[0], score.value, out, *normalizing,
        }  # fmt: skip
        name_pieces(self.builder, match)
        if not softmax.stable:
            require_visible_keys(match)
        return match

    def _sides(self, scores: Expr, score: Expr) -> list[tuple[object, Index]]:
        sides = []
        allowed = {*self.keys, *self.rows, *self._batch_atoms()}
        for node in sorted(scores.walk(), key=lambda n: n.serial):
            if node is score or node.kind not in ("leaf", "dot", "reduce"):
                continue
            if not atoms_of(node.index) <= allowed or node.value == score.value:
                raise NoMatchError("a side input of the scores varies along new axes")
            sides.append((node.value, node.index))
        return sides

    def _batch_atoms(self) -> frozenset:
        index = self._expanded(self.side)
        return frozenset(a for d in self.dims.batch[self.side] for a in index[d])

    def _output(self, softmax: Softmax, p_index: Index, v_index: Index):
        """Returns (site output, its index, values of a division after the product)."""
        value, index = self.dot.results[0], self._out_index(p_index, v_index)
        if softmax.normalized:
            return value, index, []
        pending: list = [(value, index, [])]
        while pending:
            value, index, between = pending.pop(0)
            for use in value.uses if len(between) < 8 else ():
                op = use.owner.operation
                if op.name == "stablehlo.divide" and use.operand_number == 0:
                    total = self.reader.read(op.operands[1], index)
                    if is_sum_of(self.reader, total, softmax.exponential, self.keys):
                        return op.results[0], index, between
                elif (moved := result_index(op, index)) is not None:
                    pending.append((op.results[0], moved, [*between, op.results[0]]))
        raise NoMatchError("the exponentials are never divided by their sum")

    def _out_index(self, p_index: Index, v_index: Index) -> Index:
        """Index of the value product's result: batch, then free dims by side."""
        sides = [p_index, v_index] if self.side == 0 else [v_index, p_index]
        dims = [sides[0][d] for d in self.dims.batch[0]]
        for number in (0, 1):
            free = self.dims.free(number, len(self.shapes[number]))
            dims.extend(sides[number][d] for d in free)
        return tuple(dims)

    def _same_batch(self, k: Operand, v: Operand, depth: Dim) -> bool:
        inner = {*self.keys, *depth, *self.value_dims}
        return atoms_of(k.index) - inner == atoms_of(v.index) - inner
