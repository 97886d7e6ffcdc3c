"""Binds an attention together with its backward pass."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

from hlo_tools import binding, verify
from hlo_tools.composites import Implementation
from hlo_tools.gradients import GradImplementation
from hlo_tools.matching.canonical import DTYPE_NAMES
from hlo_tools.matching.joint import Arguments, JointSite, joint_module, prove_joint
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.outline import hoist
from hlo_tools.matching.reader import dtype_of, shape_of
from hlo_tools.module import StableHloModule
from hlo_tools.passes.loop_counts import added_bytes
from hlo_tools.passes.saved_values import SavedValues
from hlo_tools.pipeline import PassContext
from hlo_tools.report import SiteReport
from hlo_tools.sharding_plan import ShardingPlan, UnshardableSiteError
from hlo_tools.verify_program import verify_texts


def struct_of(value) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of a value of a module."""
    dtype = jax.numpy.dtype(DTYPE_NAMES[dtype_of(value)])
    return jax.ShapeDtypeStruct(shape_of(value), dtype)


@dataclass
class Pair:
    """A forward composite and its backward one, proven.

    Attributes:
      forward, backward: the composites.
      proof: what they compute.
      arguments: the operands of the two.
    """

    forward: ir.Operation
    backward: ir.Operation
    proof: JointSite
    arguments: Arguments


@dataclass
class PairBinder:
    """Binds pairs of one module.

    Attributes:
      module: changed in place.
      context: target, report and options.
    """

    module: StableHloModule
    context: PassContext
    _proofs: dict[str, tuple[ir.Module, JointSite | NoMatchError]] = field(
        default_factory=dict
    )
    _spliced: dict[str, str] = field(default_factory=dict)

    def prove(self, forward: ir.Operation, backward: ir.Operation) -> Pair:
        """Proves two composites from their decompositions.

        Raises:
          NoMatchError: with the reason.
        """
        functions = self.module.functions()
        module, arguments = joint_module(functions, forward, backward)
        text = str(module.operation.get_asm())
        if text not in self._proofs:  # most layers of a model are the same
            found: JointSite | NoMatchError
            try:
                found = prove_joint(module)
            except NoMatchError as error:
                found = error
            self._proofs[text] = (module, found)
        proof = self._proofs[text][1]
        if isinstance(proof, NoMatchError):
            raise proof
        if any(place >= arguments.forward for place in proof.places):
            raise NoMatchError("the backward pass has operands of its own")
        return Pair(forward, backward, proof, arguments)

    def lowered(
        self,
        pair: Pair,
        plan: ShardingPlan | None,
        implementation: Implementation,
        report: SiteReport,
    ) -> Halves | None:
        """Makes the halves of an implementation; changes nothing.

        Returns:
          The halves, checked if that is asked for; None if they failed the check, as
          the report then says.
        """
        halves = Halves(pair, plan, implementation, self.context)
        if self.context.verify and not self._verified(halves, report):
            return None
        halves.lower()
        return halves

    def bind(self, halves: Halves) -> int:
        """Puts calls of an implementation's halves in the place of a pair.

        Returns:
          The size of what loops save now and did not before, in bytes.

        Raises:
          NoMatchError: the backward pass can not get at what it needs.
        """
        pair = halves.pair
        _put_in_order(pair)
        saved = SavedValues(pair.forward, pair.backward, pair.arguments.hops)
        before = [len(loop.results) for loop, _ in saved.loops]
        again = pair.arguments.again
        values = [pair.arguments.values[place] for place in pair.proof.places]
        forward = self._splice(halves, halves.forward, "forward")
        # the backward pass needs the values as they are there
        with ir.InsertionPoint(pair.forward), pair.forward.location:
            call = self._call(forward, values)
        out, *residuals = call.results
        pair.forward.results[0].replace_all_uses_with(out)
        pair.forward.erase()
        places = pair.proof.places
        operands = [
            again[place] if place in again else saved.get(value)
            for place, value in zip(places, values, strict=True)
        ]
        operands += [saved.get(value) for value in (out, *residuals)]
        dout = pair.proof.dout
        if dout is not None:
            cotangent = pair.arguments.values[dout]
            if dout < pair.arguments.forward:  # an operand of the forward pass, too
                cotangent = again[dout] if dout in again else saved.get(cotangent)
            operands.append(cotangent)
        backward = self._splice(halves, halves.backward, "backward")
        with ir.InsertionPoint(pair.backward), pair.backward.location:
            call = self._call(backward, operands)
        for number, place in enumerate(pair.proof.order):
            pair.backward.results[number].replace_all_uses_with(call.results[place])
        pair.backward.erase()
        return added_bytes([loop for loop, _ in saved.loops], before)

    def _splice(self, halves: Halves, lowered: binding.Lowered, half: str) -> str:
        key = halves.key(half)
        mesh = () if halves.plan is None else (halves.plan.mesh_name,)
        name = self._spliced.get(key)
        if name is None:
            digest = hashlib.sha256(key.encode()).hexdigest()[:8]
            title = key.partition("\n")[0].replace(" ", ".")
            name = binding.splice(self.module, lowered, f"{title}.{digest}", *mesh)
            self._spliced[key] = name
        return name

    def _call(self, name: str, operands: Sequence[Any]) -> func.CallOp:
        function = self.module.functions()[name]
        kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
        return func.CallOp(kind.results, ir.FlatSymbolRefAttr.get(name), list(operands))

    def _verified(self, halves: Halves, report: SiteReport) -> bool:
        """Checks both halves on random inputs; returns whether they may be bound."""
        platform = self.context.target.platform
        if not verify.can_run(platform):
            note = f"{report.id} not verified: no {platform} here"
            self.context.report.notes.append(note)
            return True
        report.verify = halves.verify(platform)
        if report.verify.passed:
            return True
        report.status = "failed"
        report.reason = verify.rolled_back(halves.implementation.name, report.verify)
        verify.announce(report)
        return False


def _put_in_order(pair: Pair) -> None:
    """Moves the forward pass up if the backward pass comes first.

    Gradients may take nothing but probabilities and a cotangent, and the result may
    be wanted much later.

    Raises:
      NoMatchError: the forward pass needs the gradients.
    """
    forward, backward = pair.forward, pair.backward
    if forward.block == backward.block and backward.is_before_in_block(forward):
        hoist(list(forward.results), backward, set(backward.results))


class Halves:
    """The two halves of an implementation for one pair, as functions of arrays.

    Attributes:
      forward, backward: the lowered halves, once `lower` was called.
    """

    forward: binding.Lowered
    backward: binding.Lowered

    def __init__(
        self,
        pair: Pair,
        plan: ShardingPlan | None,
        implementation: Implementation,
        context: PassContext,
    ):
        self.pair, self.plan, self.context = pair, plan, context
        self.implementation = implementation
        self.site, self.gradient = pair.proof.site, pair.proof.gradient

    def _build(self, plan: ShardingPlan | None):
        grad: GradImplementation | None = self.implementation.grad
        assert grad is not None
        spec = self.site.spec if plan is None else plan.local_spec
        forward, backward = grad.build(spec, self.gradient.spec, self.context.target)
        if plan is not None:
            forward, backward = plan.wrap_pair(forward, backward, self.gradient.spec)
        return forward, backward

    def key(self, half: str) -> str:
        """Returns a text that is equal for pairs that share this half."""
        target = self.context.target.spec.name
        lines = [
            f"hlo_tools.attention {self.implementation.name} {half}",
            f"{target} {self.plan.signature() if self.plan else ''}",
            self.site.signature(),
            repr(self.gradient.spec),
        ]
        if half == "backward":
            lines.append(self.gradient.signature())
            lines.append(str(self.pair.proof.dout is None))
        return "\n".join(lines)

    def _types(self) -> list[jax.ShapeDtypeStruct]:
        return [struct_of(value) for value in self.site.values]

    def _lower(self, function, types, half: str) -> binding.Lowered:
        platform = binding.PLATFORM_NAMES[self.context.target.platform]
        key = (self.key(half), self.implementation)
        return binding.lower_function(function, types, platform, key)

    def lower(self) -> None:
        """Lowers (values) -> (out, *residuals), and then
        (values, out, *residuals[, dout]) -> gradients."""
        forward, backward = self._build(self.plan)
        values, out = self._types(), struct_of(self.site.match.out)
        adapted = self.gradient.adapt_forward(forward)
        self.forward = self._lower(adapted, values, "forward")
        residuals = self.forward.results[1:]
        types = [*values, out, *residuals]
        if self.pair.proof.dout is not None:
            types.append(struct_of(self.gradient.match.dout.value))
        function = self._flat_backward(backward, len(values), len(residuals))
        self.backward = self._lower(function, types, "backward")

    def _flat_backward(self, backward, values: int, residuals: int):
        adapted = self.gradient.adapt_backward(backward)

        def flat(*arrays):
            rest = arrays[values + 1 :]
            dout = rest[residuals] if len(rest) > residuals else None
            return adapted(arrays[:values], arrays[values], rest[:residuals], dout)

        return flat

    def verify(self, platform: str):
        """Runs the original pair and this one on the same random inputs."""
        forward, backward = self._build(None)
        places, dout = self.pair.proof.places, self.pair.proof.dout

        def both(*arrays):
            values = [arrays[place] for place in places]
            out, *residuals = self.gradient.adapt_forward(forward)(*values)
            cotangent = None if dout is None else arrays[dout]
            adapted = self.gradient.adapt_backward(backward)
            found = adapted(values, out, residuals, cotangent)
            return out, *(found[place] for place in self.pair.proof.order)

        function = self.pair.proof.function
        types = [struct_of(v) for v in function.regions[0].blocks[0].arguments]
        name = binding.PLATFORM_NAMES[self.context.target.platform]
        lowered = binding.lower_function(both, types, name, None)
        spec = self.site.spec
        dtypes = (spec.q_dtype, spec.score_dtype, spec.probs_dtype, spec.out_dtype)
        return verify_texts(
            self.pair.proof.text,
            lowered.text,
            types,
            list(range(len(types))),
            platform,
            verify.tolerance_of((*dtypes, *self.gradient.spec.dtypes), platform),
            spec.k_len,
        )


def plan_of(sharding, backward, pair: Pair) -> ShardingPlan | None:
    """Returns how both halves are called without moving data; None on one device.

    Raises:
      UnshardableSiteError: they can not be.
    """
    for one in (sharding, backward):
        if isinstance(one, UnshardableSiteError):
            raise one
    if sharding is None:
        return None
    plan = sharding.plan(pair.proof.site)
    proof, dout = pair.proof, None
    if proof.dout is not None:
        value = pair.arguments.values[proof.dout]
        operands = list(pair.backward.operands)
        if value not in operands:
            raise UnshardableSiteError("the cotangent is the forward pass's own array")
        dout = operands.index(value)
    backward.check_backward(proof.gradient, plan, dout, proof.order)
    return plan
