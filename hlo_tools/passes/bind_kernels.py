"""bind-kernels: gives each outlined site the fastest implementation that can run."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

from hlo_tools import binding, verify
from hlo_tools.composites import Implementation
from hlo_tools.errors import UnknownNameError, describe_error
from hlo_tools.matching.attention import match_attention
from hlo_tools.matching.canonical import CanonicalSite
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.products import value_products
from hlo_tools.module import StableHloModule
from hlo_tools.passes.bind_pairs import PairBinder, plan_of, struct_of
from hlo_tools.passes.composite_attributes import (
    callee_of,
    escapes_of,
    name_of,
    recomputes,
    site_of,
)
from hlo_tools.passes.loop_counts import executions, stacked_bytes
from hlo_tools.passes.outline_attention import COMPOSITE, GRADIENT, attributes_of
from hlo_tools.pipeline import LEFT_ALONE, PassContext
from hlo_tools.report import SiteReport
from hlo_tools.sharding_plan import UnshardableSiteError
from hlo_tools.sharding_propagation import site_shardings
from hlo_tools.verify_program import verify_texts


@dataclass(frozen=True)
class BindKernels:
    """Replaces hlo_tools composites by calls of implementations.

    A site whose semantics can not be proven again from its decomposition, or
    for which nothing beats XLA's own code, is left as it is.

    Options:
      only: if not empty, the one implementation that may be bound.
      skip-sites: ids of sites to leave alone, joined by "+".
      only-sites: if not empty, ids of all sites that may be bound.
    """

    name: ClassVar[str] = "bind-kernels"
    exactness: ClassVar[str] = "reassociating"
    summary: ClassVar[str] = "bind composites to the fastest correct implementation"

    needs: ClassVar[tuple[str, ...]] = ("stablehlo.composite",)

    only: str = ""
    skip_sites: str = ""
    only_sites: str = ""

    def __post_init__(self) -> None:
        known = binding.load_implementations(COMPOSITE) if self.only else {}
        if self.only and self.only not in known:
            raise UnknownNameError("implementation", self.only, list(known))

    def run(self, module: StableHloModule, context: PassContext) -> bool:
        failed: dict[str, str] = {}
        while True:
            if not _composites(module):
                return False
            report = context.report
            before = module.clone(), copy.deepcopy((report.sites, report.notes))
            run = _Run(self, module, context, failed)
            try:
                return run.all_sites()
            except _SiteError as error:
                # it may have left the module half changed: begin anew without it
                failed[error.site] = error.reason
                module.module = before[0].module
                report.sites[:], report.notes[:] = before[1]


def _composites(module: StableHloModule) -> list[ir.Operation]:
    """Returns the sites' operations, in order; unused ones are erased."""
    found = []
    for op in module.walk("stablehlo.composite"):
        if name_of(op) not in (COMPOSITE, GRADIENT):
            continue
        if any(list(result.uses) for result in op.results):
            found.append(op)
        else:  # such as a backward pass that belongs to two sites, outlined twice
            op.erase()
    return found


class _SiteError(Exception):
    """Something that no site should raise, while the module was being changed."""

    def __init__(self, site: str, reason: str):
        self.site, self.reason = site, reason
        super().__init__(f"{site}: {reason}")


class _Run:
    """One run of the pass over one module."""

    def __init__(
        self,
        options: BindKernels,
        module: StableHloModule,
        context: PassContext,
        failed: Mapping[str, str],
    ):
        self.options, self.module, self.context = options, module, context
        self.failed = failed
        self.functions = module.functions()
        self.spliced: dict[str, str] = {}
        self.pairs = PairBinder(module, context)
        self.changing = False  # whether the site at hand is being replaced

    def all_sites(self) -> bool:
        """Binds what can be bound; returns whether anything was.

        Raises:
          _SiteError: a site failed half-way.
        """
        composites = _composites(self.module)
        shardings = site_shardings(self.module, composites)
        forward, backward = [], {}
        for op, sharding in zip(composites, shardings, strict=True):
            if name_of(op) == COMPOSITE:
                forward.append((op, sharding))
            else:
                backward.setdefault(site_of(op), []).append((op, sharding))
        bound = 0
        for op, sharding in forward:
            bound += self.site(op, sharding, backward.get(site_of(op), []))
        return bound > 0

    def site(self, op, sharding, backward) -> bool:
        """Binds one site, with its backward pass if it has one; returns whether.

        Whatever an implementation or MLIR raises costs this site alone.
        """
        options, report = self.options, _report_of(op, self.context)
        if self.context.leaves_alone(report.id, options.skip_sites, options.only_sites):
            report.reason = LEFT_ALONE
            return False
        report.executions = executions(op)
        if not backward:
            report.gradient = None
        self.changing = False
        try:
            if report.id in self.failed:
                return self._fails(report, self.failed[report.id])
            return self._site(op, sharding, backward, report)
        except Exception as error:
            if self.context.strict:
                raise
            reason = f"binding it failed: {describe_error(error)}"
            if self.changing:
                raise _SiteError(report.id, reason) from error
            return self._fails(report, reason)

    def _fails(self, report: SiteReport, reason: str) -> bool:
        report.status, report.reason = "failed", reason
        verify.announce(report)
        return False

    def _site(self, op, sharding, backward, report) -> bool:
        escapes = escapes_of(op)
        try:
            if backward:
                return self._pair(op, sharding, backward, report, escapes)
            site = rebuild_site(self.functions[callee_of(op)])
            report.attributes = {**attributes_of(site), **escapes}
            return self._bind(op, site, sharding, report, bool(escapes))
        except NoMatchError as error:
            report.reason = f"not proven from its decomposition: {error.reason}"
        except UnshardableSiteError as error:
            report.reason = str(error)
        return False

    def _pair(self, op, sharding, backward, report, escapes) -> bool:
        if len(backward) > 1:
            report.reason = f"it has {len(backward)} backward passes"
            return False
        ((other, other_sharding),) = backward
        pair = self.pairs.prove(op, other)
        site = pair.proof.site
        report.attributes = {**attributes_of(site), **escapes}
        grad = pair.proof.gradient.spec
        report.gradient = {
            "wanted": [str(name) for name in grad.wanted],
            "location": (report.gradient or {}).get("location"),
            "bound": False,
        }
        again = recomputes(other)
        plan = plan_of(sharding, other_sharding, pair)
        spec = site.spec if plan is None else plan.local_spec
        choice = binding.choose(COMPOSITE, spec, self.context.target, grad)
        implementation = self._bindable(choice, report, bool(escapes))
        if implementation is None:
            return False
        halves = self.pairs.lowered(pair, plan, implementation, report)
        if halves is None:
            return False
        count = site.spec.score_count
        stacked = stacked_bytes(pair.backward, pair.arguments.hops, count)
        self.changing = True
        stacked -= self.pairs.bind(halves)
        self._bound(choice, spec, plan, report)
        # of each device
        report.bytes_saved += max(stacked, 0) * spec.score_count // count
        report.gradient["bound"] = True
        if again:  # the product of queries and keys, once more
            report.recompute_avoided_flops = 2 * spec.score_count * spec.head_dim
        return True

    def _bindable(
        self, choice: binding.Choice, report, escapes: bool
    ) -> Implementation | None:
        """Reports a choice; returns what is to be bound, if anything."""
        report.candidates = choice.candidates
        report.predicted_seconds = {
            c.name: c.predicted_seconds
            for c in choice.candidates
            if c.predicted_seconds is not None
        }
        report.reason = choice.reason
        if escapes:
            where = ", ".join(report.attributes["escapes"])
            report.reason = (
                "its scores or probabilities are computed anyway, for other uses: "
                f"{where}"
            )
            if unproven := report.attributes.get("unproven"):
                report.reason = (
                    "its backward pass needs the probabilities, and is not proven: "
                    f"{unproven}"
                )
            return None
        if choice.implementation is None:
            return None
        only = self.options.only
        if only and choice.implementation.name != only:
            report.reason = f"bind-kernels{{only={only}}} leaves it alone"
            return None
        return choice.implementation

    def _bound(self, choice: binding.Choice, spec, plan, report: SiteReport) -> None:
        implementation = choice.implementation
        assert implementation is not None
        report.status, report.implementation = "bound", implementation.name
        report.config = dict(implementation.config(spec, self.context.target))
        report.bytes_saved = choice.bytes_saved
        if plan is not None and plan.description:
            report.config["shard_map"] = plan.description

    def _bind(self, op, site: CanonicalSite, sharding, report, escapes) -> bool:
        """Binds a forward pass if that pays; returns whether it did."""
        if isinstance(sharding, UnshardableSiteError):
            raise sharding
        plan = sharding.plan(site) if sharding is not None else None
        spec = site.spec if plan is None else plan.local_spec
        choice = binding.choose(COMPOSITE, spec, self.context.target)
        implementation = self._bindable(choice, report, escapes)
        if implementation is None:
            return False
        if self.context.verify and not _verified(
            self.module, op, site, implementation, report, self.context
        ):
            return False
        signature, lowered = self._lowered(site, plan, implementation)
        self.changing = True
        self._call(op, site, plan, implementation, signature, lowered)
        self._bound(choice, spec, plan, report)
        return True

    def _lowered(self, site, plan, implementation) -> tuple[str, binding.Lowered]:
        """Returns a text that is equal for equal kernels, and the kernel."""
        signature = (
            f"{implementation.name} {self.context.target.spec.name}\n"
            f"{plan.signature() if plan else ''}\n{site.signature()}"
        )
        lowered = lower_site(site, plan, implementation, self.context, signature)
        return signature, lowered

    def _call(self, op, site, plan, implementation, signature, lowered) -> None:
        """Puts a call of the implementation in the place of the composite."""
        name = self.spliced.get(signature)
        if name is None:
            digest = hashlib.sha256(signature.encode()).hexdigest()[:8]
            wanted = f"{COMPOSITE}.{implementation.name}.{digest}"
            mesh = () if plan is None else (plan.mesh_name,)
            name = binding.splice(self.module, lowered, wanted, *mesh)
            self.spliced[signature] = name
        places = [ir.BlockArgument(value).arg_number for value in site.values]
        with ir.InsertionPoint(op), op.location:
            call = func.CallOp(
                [op.results[0].type],
                ir.FlatSymbolRefAttr.get(name),
                [op.operands[place] for place in places],
            )
        op.results[0].replace_all_uses_with(call.results[0])
        op.erase()


def rebuild_site(function: ir.OpView) -> CanonicalSite:
    """Proves a site again from its decomposition.

    Raises:
      NoMatchError: the function is no attention of its arguments.
    """
    block = function.regions[0].blocks[0]
    (result,) = list(block.operations)[-1].operands
    for op in block.operations:
        if op.operation.name != "stablehlo.exponential":
            continue
        for dot, side in value_products(op):
            try:
                match = match_attention(dot, side, op)
            except NoMatchError:
                continue
            site = CanonicalSite(match)
            arguments = all(isinstance(v.owner, ir.Block) for v in site.values)
            if match.out == result and arguments:
                return site
    raise NoMatchError("its result is no attention of its arguments")


def lower_site(site, plan, implementation: Implementation, context, key):
    """Lowers an implementation for one site's own operand layout."""
    target = context.target
    if plan is None:
        kernel = implementation.build(site.spec, target)
    else:
        kernel = plan.wrap(implementation.build(plan.local_spec, target))
    types = [struct_of(value) for value in site.values]
    platform = binding.PLATFORM_NAMES[target.platform]
    key = None if key is None else (key, implementation)
    return binding.lower_function(site.adapt(kernel), types, platform, key)


def _verified(
    module: StableHloModule, op, site: CanonicalSite, implementation, report, context
) -> bool:
    """Checks an implementation on this site; returns whether it may be bound."""
    target = context.target
    platform = target.platform
    if not verify.can_run(platform):
        context.report.notes.append(f"{report.id} not verified: no {platform} here")
        return True
    function = module.functions()[callee_of(op)]
    arguments = function.regions[0].blocks[0].arguments
    types = [struct_of(value) for value in arguments]
    lowered = lower_site(site, None, implementation, context, None)
    spec = site.spec
    report.verify = verify_texts(
        verify.module_of_function(function),
        lowered.text,
        types,
        [ir.BlockArgument(value).arg_number for value in site.values],
        platform,
        verify.tolerance_of(
            (spec.q_dtype, spec.score_dtype, spec.probs_dtype, spec.out_dtype), platform
        ),
        spec.k_len,
    )
    if report.verify.passed:
        return True
    report.status = "failed"
    report.reason = verify.rolled_back(implementation.name, report.verify)
    verify.announce(report)
    return False


def _report_of(op: ir.Operation, context: PassContext) -> SiteReport:
    """Returns the site's report; a new one for modules outlined elsewhere."""
    name = site_of(op)
    for site in context.report.sites:
        if site.id == name:
            return site
    number = sum(one.pattern == "attention" for one in context.report.sites)
    site = SiteReport(id=name or f"attention.{number}", pattern="attention")
    context.report.sites.append(site)
    return site
