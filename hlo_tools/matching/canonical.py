"""From a proven site to what implementations understand, and back.

Implementations see queries [B,T,H,D], keys [B,S,K,D], values [B,S,K,Dv] and side
inputs [B|1,K|1,G|1,T|1,S|1], whatever the program's own layout is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from hlo_tools.composites import AttentionSpec, SideSpec
from hlo_tools.matching.arrays import full_array, regroup_array
from hlo_tools.matching.attention import AttentionMatch
from hlo_tools.matching.evaluation import OPERATIONS, evaluate
from hlo_tools.matching.expressions import NUMPY_TYPES, Expr
from hlo_tools.matching.index_space import Atom, Index, dim_size
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.reader import dtype_of, shape_of, table_of
from hlo_tools.matching.softmax import strip_converts

DTYPE_NAMES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
    "i1": "bool", **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"ui{n}": f"uint{n}" for n in (8, 16, 32, 64)},
}  # fmt: skip


# Constants up to this size become part of an implementation; larger ones are
# handed over as operands.
_MAX_EMBEDDED_BYTES = 1 << 20


@dataclass(frozen=True)
class _Side:
    """A side input: an operand, a constant, or (neither) positions."""

    place: int | None  # in CanonicalSite.values
    table: np.ndarray | None
    index: Index
    dtype: str


class CanonicalSite:
    """A match in canonical form.

    Attributes:
      match: the proven site.
      spec: its semantics for implementations.
      values: the program's values that the site reads, in order.
    """

    def __init__(self, match: AttentionMatch):
        self.match = match
        for node in match.scores.walk():
            if node.kind == "op" and node.name not in _EVALUABLE:
                raise NoMatchError(f"the scores go through stablehlo.{node.name}")
        factors = (match.q.scale, match.k.scale, match.pieces.scale)
        if not 1e-30 < abs(math.prod(factors)) < 1e30:
            raise NoMatchError(f"the scales {factors} leave float32's range together")
        axes = match.axes
        self.side_groups = (
            axes.batch, axes.kv_heads, axes.group, axes.rows, axes.keys,
        )  # fmt: skip
        self.values: list[Any] = [match.q.value, match.k.value, match.v.value]
        self._leaves: dict[int, int] = {}  # id of node -> number of the side
        self._sides: list[_Side] = []
        self._collect_sides()
        self.spec = self._make_spec()

    def _relevant_nodes(self) -> list[Expr]:
        """Returns the nodes that implementations evaluate."""
        match = self.match
        roots = [match.scores]
        if match.pieces.named:
            # positions alone are told by causal, window and offset
            roots = [expr for _, expr in match.pieces.biases] + match.data_masks
            roots += [match.scores] if match.guarded else []
        nodes = {id(node): node for root in roots for node in root.walk()}
        return sorted(nodes.values(), key=lambda node: node.serial)

    def _collect_sides(self) -> None:
        axes, places = self.match.axes, {}
        for node in self._relevant_nodes():
            if node is self.match.score or node.kind in ("const", "op"):
                continue
            place, table = None, None
            if node.kind == "iota":
                if node.index in ((axes.rows,), (axes.keys,)):
                    continue
            else:
                table = table_of(node.value)
                if table is None or table.nbytes > _MAX_EMBEDDED_BYTES:
                    table, place = None, places.get(node.value)
                    if place is None:
                        place = places[node.value] = len(self.values)
                        self.values.append(node.value)
            self._leaves[id(node)] = len(self._sides)
            self._sides.append(_Side(place, table, node.index, node.dtype))

    def _side_shape(self, index: Index) -> tuple[int, ...]:
        atoms = {atom for dim in index for atom in dim}
        return tuple(
            dim_size(group) if atoms & set(group) else 1 for group in self.side_groups
        )

    def _make_spec(self) -> AttentionSpec:
        match, axes, pieces = self.match, self.match.axes, self.match.pieces
        factor = match.q.scale * match.k.scale
        causal, window, offset = _named_band(match)
        sides = tuple(
            SideSpec(self._side_shape(side.index), DTYPE_NAMES[side.dtype])
            for side in self._sides
        )
        spec = AttentionSpec(
            batch=dim_size(axes.batch),
            q_len=dim_size(axes.rows),
            k_len=dim_size(axes.keys),
            kv_heads=dim_size(axes.kv_heads),
            group=dim_size(axes.group),
            head_dim=dim_size(axes.depth),
            value_dim=dim_size(axes.value),
            q_dtype=DTYPE_NAMES[dtype_of(match.q.value)],
            k_dtype=DTYPE_NAMES[dtype_of(match.k.value)],
            v_dtype=DTYPE_NAMES[dtype_of(match.v.value)],
            score_dtype=DTYPE_NAMES[match.score.dtype],
            softmax_dtype=DTYPE_NAMES[match.softmax_dtype],
            probs_dtype=DTYPE_NAMES[match.probs_dtype],
            out_dtype=DTYPE_NAMES[dtype_of(match.out)],
            precision=(
                _precision(match.score_product),
                _precision(match.value_product),
            ),
            scale=pieces.scale * factor,
            softcap=pieces.softcap,
            causal=causal,
            window=window,
            offset=offset,
            has_bias=bool(pieces.biases),
            bias_dtype=_bias_dtype(pieces.biases),
            has_mask=bool(match.data_masks),
            mask_fill=pieces.fill,
            named=pieces.named,
            guarded=match.guarded,
            rows_never_empty=match.rows_never_empty,
            sides=sides,
            score_mod=self._score_mod(factor),
            exact_mod=self._score_mod(factor) if match.guarded else None,
            bias_fn=self._bias_fn if pieces.named else None,
            mask_fn=self._mask_fn if pieces.named else None,
        )
        if not pieces.named:
            return spec
        return dataclasses.replace(spec, score_mod=self._named_score_mod(spec))

    def _evaluate(self, expr: Expr, sides, q_pos, k_pos, scores=None):
        inputs = {node: sides[place] for node, place in self._leaves.items()}
        if scores is not None:
            inputs[id(self.match.score)] = scores

        def positions(node: Expr):
            if node.index == (self.match.axes.rows,):
                return q_pos[:, None]
            return k_pos

        return evaluate(expr, inputs, positions)

    def _score_mod(self, factor: float) -> Callable:
        def score_mod(scores, sides, q_pos, k_pos):
            scaled = scores if factor == 1.0 else scores * factor
            result = self._evaluate(self.match.scores, sides, q_pos, k_pos, scaled)
            return result.astype(scores.dtype)

        return score_mod

    def _named_score_mod(self, spec: AttentionSpec) -> Callable:
        """Returns the function of the scores that the named pieces describe."""
        low, high = spec.band

        def score_mod(scores, sides, q_pos, k_pos):
            result = scores * spec.scale
            if spec.softcap is not None:
                result = spec.softcap * jnp.tanh(result / spec.softcap)
            bias = self._bias_fn(sides, q_pos, k_pos)
            if bias is not None:
                result = result + bias.astype(scores.dtype)
            visible = self._mask_fn(sides, q_pos, k_pos)
            distance = k_pos[None, :] - q_pos[:, None]
            for bound, holds in ((low, jnp.greater_equal), (high, jnp.less_equal)):
                if bound is not None:
                    inside = holds(distance, bound)
                    visible = inside if visible is None else visible & inside
            if visible is not None:
                assert spec.mask_fill is not None
                result = jnp.where(visible, result, spec.mask_fill)
            return result

        return score_mod

    def _bias_fn(self, sides, q_pos, k_pos):
        dtype = jnp.float64 if self.match.score.dtype == "f64" else jnp.float32
        total = None
        for factor, expr in self.match.pieces.biases:
            term = self._evaluate(expr, sides, q_pos, k_pos).astype(dtype)
            term = term if factor == 1 else factor * term
            total = term if total is None else total + term
        return total if total is None else _rank5(total)

    def _mask_fn(self, sides, q_pos, k_pos):
        total = None
        for expr in self.match.data_masks:
            term = self._evaluate(expr, sides, q_pos, k_pos)
            total = term if total is None else total & term
        return total if total is None else _rank5(total)

    def adapt(self, implementation: Callable) -> Callable:
        """Returns a function of the program's own arrays.

        Args:
          implementation: canonical (q, k, v, *sides) -> out [B,T,H,Dv].
        """

        def site(*values):
            return self.result_of(implementation(*self.operands_of(values)))

        return site

    def operands_of(self, values: Sequence) -> list:
        """Returns q, k, v and the sides in canonical form.

        Args:
          values: the program's arrays, as `self.values`.
        """
        match, axes, spec = self.match, self.match.axes, self.spec
        heads = (axes.kv_heads, axes.group)
        q, k, v = values[:3]
        b, t, s = spec.batch, spec.q_len, spec.k_len
        q = full_array(q, match.q.index, (axes.batch, axes.rows, *heads, axes.depth))
        q = q.reshape(b, t, spec.kv_heads * spec.group, spec.head_dim)
        k = full_array(k, match.k.index, (axes.batch, axes.keys, heads[0], axes.depth))
        k = k.reshape(b, s, spec.kv_heads, spec.head_dim)
        v = full_array(v, match.v.index, (axes.batch, axes.keys, heads[0], axes.value))
        v = v.reshape(b, s, spec.kv_heads, spec.value_dim)
        return [q, k, v, *(self._side_array(side, values) for side in self._sides)]

    def result_of(self, out):
        """Returns the program's own form of a canonical result [B,T,H,Dv]."""
        shape = shape_of(self.match.out)
        return regroup_array(out, self.out_axes, self.match.out_index, shape)

    @property
    def out_axes(self) -> Index:
        """The atoms of [B,T,K,G,Dv], the canonical result but for the heads."""
        axes = self.match.axes
        return (axes.batch, axes.rows, axes.kv_heads, axes.group, axes.value)

    @property
    def side_values(self) -> list[tuple[int, Index]]:
        """(number in `values`, index) of the side inputs that are operands."""
        return [(s.place, s.index) for s in self._sides if s.place is not None]

    def side_number(self, node: Expr) -> int | None:
        """Returns which side operand a leaf of the scores is, or None."""
        return self._leaves.get(id(node))

    def side_atoms(self, node: Expr) -> Index:
        """Returns the atoms of each dimension of a side operand, () for size 1."""
        own = {atom for dim in node.index for atom in dim}
        return tuple(dim if own & set(dim) else () for dim in self.side_groups)

    def _side_array(self, side: _Side, values):
        if side.place is not None:
            array = values[side.place]
        elif side.table is not None:
            array = jnp.asarray(side.table)
        else:
            array = jnp.arange(dim_size(side.index[0]), dtype=NUMPY_TYPES[side.dtype])
        shape = self._side_shape(side.index)
        return regroup_array(array, side.index, self.side_groups, shape)

    def show_index(self, index: Index) -> str:
        """Returns a text for an index that is the same for sites of one form."""
        names: dict[Atom, str] = {}
        for role, dim in vars(self.match.axes).items():
            for number, atom in enumerate(dim):
                names[atom] = f"{role}{number}:{atom.size}"
        return "|".join(",".join(names[a] for a in dim) for dim in index)

    def signature(self) -> str:
        """Returns a text that is equal for sites that one function can serve."""
        show = self.show_index
        memo: dict[int, str] = {}

        def text(node: Expr) -> str:
            if id(node) not in memo:
                memo[id(node)] = f"%{len(memo)}"
                args = [text(arg) for arg in node.args]
                if node is self.match.score:
                    body = "score"
                elif node.kind == "const":
                    body = node.data.tobytes().hex()
                elif node.kind == "op":
                    body = f"{node.name}({','.join(args)})"
                else:
                    body = f"{node.kind}[{show(node.index)}]{self._name_of(node)}"
                lines.append(f"{memo[id(node)]}={body}:{node.dtype}")
            return memo[id(node)]

        lines: list[str] = []
        text(self.match.scores)
        for operand in (self.match.q, self.match.k, self.match.v):
            lines.append(f"{show(operand.index)} * {operand.scale!r}")
        lines.append(show(self.match.out_index))
        lines.extend(str(value.type) for value in self.values)
        lines.extend(
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self.spec)
            if not callable(value := getattr(self.spec, field.name))
        )
        return "\n".join(lines)

    def _name_of(self, node: Expr) -> str:
        """Tells leaves apart: by operand number, or by their elements."""
        if node.kind == "iota":
            return ""
        number = self._leaves.get(id(node))
        if number is not None and self._sides[number].place is not None:
            return f"#{self._sides[number].place}"
        table = table_of(node.value)
        if table is None:
            return f"#{node.serial}"
        return hashlib.sha256(table.tobytes()).hexdigest()


_EVALUABLE = {*OPERATIONS, "convert", "divide", "remainder"}


def _rank5(array):
    return array.reshape((1,) * (5 - array.ndim) + array.shape)


def _precision(dot) -> str:
    if "precision_config" not in dot.attributes:
        return "DEFAULT"
    names = {
        str(part).split()[-1].rstrip(">") for part in dot.attributes["precision_config"]
    }
    for name in ("HIGHEST", "HIGH"):
        if name in names:
            return name
    return "DEFAULT"


def _named_band(match: AttentionMatch):
    """Returns (causal, window, offset) for the band of visible keys."""
    band = match.band
    if not match.pieces.named or band is None or band.lower is band.upper is None:
        return False, None, 0
    if band.upper is None:
        assert band.lower is not None
        return False, (-band.lower, None), 0
    if band.lower is None:
        return True, None, band.upper
    if band.upper == 0 or band.lower > 0 or band.upper < 0:
        return True, (band.upper - band.lower, 0), band.upper
    return False, (-band.lower, band.upper), 0


def _bias_dtype(biases: Sequence[tuple[float, Expr]]) -> str | None:
    """Returns a dtype that holds the sum of the biases exactly."""
    if not biases:
        return None
    factor, expr = biases[0]
    if len(biases) == 1 and abs(factor) == 1:
        return DTYPE_NAMES[strip_converts(expr).dtype]
    return "float64" if expr.dtype == "f64" else "float32"
