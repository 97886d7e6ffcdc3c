"""From a proven backward pass to what implementations understand, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from hlo_tools.gradients import GradSpec
from hlo_tools.matching.arrays import full_array, regroup_array
from hlo_tools.matching.canonical import DTYPE_NAMES, CanonicalSite
from hlo_tools.matching.cotangents import GradOutput
from hlo_tools.matching.gradient import GradMatch
from hlo_tools.matching.index_space import Index
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.reader import dtype_of, shape_of, splat_value


class CanonicalGradient:
    """A backward pass in canonical form.

    Attributes:
      site: its forward pass.
      match: the proven backward pass.
      spec: which gradients are wanted.
    """

    def __init__(self, site: CanonicalSite, match: GradMatch):
        self.site, self.match = site, match
        wanted = tuple(self._name(output) for output in match.outputs)
        self.spec = GradSpec(
            wanted=wanted,
            dtypes=tuple(DTYPE_NAMES[dtype_of(o.value)] for o in match.outputs),
            dout_dtype=DTYPE_NAMES[dtype_of(match.dout.value)],
        )

    def _name(self, output: GradOutput) -> str | int:
        if isinstance(output.wanted, str):
            return output.wanted
        number = self.site.side_number(output.wanted)
        if number is None:
            raise NoMatchError("a gradient of an array that has no part in the scores")
        return number

    def adapt_forward(self, forward: Callable) -> Callable:
        """Returns the forward half on the program's arrays.

        Args:
          forward: canonical (q, k, v, *sides) -> (out, *residuals).
        """

        def site(*values):
            out, *residuals = forward(*self.site.operands_of(values))
            return self.site.result_of(out), *residuals

        return site

    def adapt_backward(self, backward: Callable) -> Callable:
        """Returns the backward half on the program's arrays.

        Args:
          backward: canonical (q, k, v, *sides, out, *residuals, dout) -> gradients.

        Returns:
          A function of (values, out, residuals, dout), the first and third tuples;
          dout is None where it is a constant of the program.
        """

        def gradient(values: Sequence[Any], out, residuals: Sequence[Any], dout):
            site = self.site
            spec, match = site.spec, site.match
            shape = (spec.batch, spec.q_len, spec.heads, spec.value_dim)
            out = full_array(out, match.out_index, site.out_axes).reshape(shape)
            dout = self._constant_dout() if dout is None else dout
            dout = full_array(dout, self.match.dout.index, site.out_axes)
            dout = dout.reshape(shape)
            found = backward(*site.operands_of(values), out, *residuals, dout)
            return tuple(
                self._result(output, array)
                for output, array in zip(self.match.outputs, found, strict=True)
            )

        return gradient

    def _constant_dout(self):
        value = self.match.dout.value
        attr = value.owner.attributes["value"]
        dtype = DTYPE_NAMES[dtype_of(value)]
        return jnp.full(shape_of(value), splat_value(attr), dtype)

    def _result(self, output: GradOutput, array):
        axes = self.site.match.axes
        heads = (axes.kv_heads, axes.group)
        index: Index = ()
        if output.wanted == "q":
            index = (axes.batch, axes.rows, *heads, axes.depth)
        elif output.wanted == "k":
            index = (axes.batch, axes.keys, axes.kv_heads, axes.depth)
        elif output.wanted == "v":
            index = (axes.batch, axes.keys, axes.kv_heads, axes.value)
        # what was broadcast to the canonical form is summed over
        flat = [atom for dim in index for atom in dim]
        own = {atom for dim in output.index for atom in dim}
        if isinstance(output.wanted, str):
            array = array.reshape([atom.size for atom in flat])
        else:
            side = self.site.side_atoms(output.wanted)
            flat = [atom for dim in side for atom in dim]
            array = array.reshape([atom.size for atom in flat])
        extra = tuple(n for n, atom in enumerate(flat) if atom not in own)
        if extra:
            array = array.sum(extra, dtype=array.dtype)
        if output.factor != 1.0:
            array = (array * output.factor).astype(array.dtype)
        left = tuple((atom,) for atom in flat if atom in own)
        return regroup_array(array, left, output.index, shape_of(output.value))

    def signature(self) -> str:
        """Returns a text that is equal for backward passes that one function serves."""
        show = self.site.show_index
        lines = [repr(self.spec), show(self.match.dout.index)]
        for output in self.match.outputs:
            kind = str(output.value.type)
            lines.append(f"{show(output.index)} * {output.factor!r} : {kind}")
        return "\n".join(lines)
