"""bind-kernels: gives each outlined site the fastest implementation that can run."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

from hlo_tools import binding, verify
from hlo_tools.composites import Implementation
from hlo_tools.errors import UnknownNameError
from hlo_tools.matching.attention import match_attention
from hlo_tools.matching.canonical import DTYPE_NAMES, CanonicalSite
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.products import value_products
from hlo_tools.matching.reader import dtype_of, shape_of
from hlo_tools.module import StableHloModule
from hlo_tools.passes.outline_attention import COMPOSITE, attributes_of
from hlo_tools.pipeline import LEFT_ALONE, PassContext
from hlo_tools.report import SiteReport
from hlo_tools.site_sharding import UnshardableSiteError, site_shardings


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

    def run(self, module: StableHloModule, context: PassContext) -> bool:
        composites = [
            op
            for op in module.walk("stablehlo.composite")
            if ir.StringAttr(op.attributes["name"]).value == COMPOSITE
        ]
        known = binding.load_implementations(COMPOSITE)
        if self.only and self.only not in known:
            raise UnknownNameError("implementation", self.only, list(known))
        if not composites:
            return False
        shardings = site_shardings(module, composites)
        functions, bound = module.functions(), 0
        spliced: dict[str, str] = {}
        for op, sharding in zip(composites, shardings, strict=True):
            report = _report_of(op, context)
            if context.leaves_alone(report.id, self.skip_sites, self.only_sites):
                report.reason = LEFT_ALONE
                continue
            name = ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value
            try:
                site = rebuild_site(functions[name])
                bound += self._bind(
                    module, op, site, sharding, report, context, spliced
                )
            except NoMatchError as error:
                report.reason = f"not proven from its decomposition: {error.reason}"
        return bound > 0

    def _bind(
        self, module, op, site: CanonicalSite, sharding, report, context, spliced
    ) -> bool:
        """Binds one site if that pays; returns whether it did."""
        report.attributes = {**attributes_of(site), **_escapes(op)}
        if isinstance(sharding, UnshardableSiteError):
            report.reason = str(sharding)
            return False
        try:
            plan = sharding.plan(site) if sharding is not None else None
        except UnshardableSiteError as error:
            report.reason = str(error)
            return False
        spec = site.spec if plan is None else plan.local_spec
        choice = binding.choose(COMPOSITE, spec, context.target)
        report.candidates = choice.candidates
        report.predicted_seconds = {
            c.name: c.predicted_seconds
            for c in choice.candidates
            if c.predicted_seconds is not None
        }
        report.reason = choice.reason
        if "escapes" in report.attributes:
            where = ", ".join(report.attributes["escapes"])
            report.reason = (
                "its scores or probabilities are computed anyway, for other uses (as a "
                f"backward pass has them): {where}"
            )
            return False
        implementation = choice.implementation
        if implementation is None:
            return False
        if self.only and implementation.name != self.only:
            report.reason = f"bind-kernels{{only={self.only}}} leaves it alone"
            return False
        if context.verify and not _verified(
            module, op, site, implementation, report, context
        ):
            return False
        self._call(module, op, site, plan, implementation, context, spliced)
        report.status, report.implementation = "bound", implementation.name
        report.config = dict(implementation.config(spec, context.target))
        report.bytes_saved = choice.bytes_saved
        if plan is not None and plan.description:
            report.config["shard_map"] = plan.description
        return True

    def _call(self, module, op, site, plan, implementation, context, spliced) -> None:
        """Puts a call of the implementation in the place of the composite."""
        signature = (
            f"{implementation.name} {context.target.spec.name}\n"
            f"{plan.description if plan else ''}\n{site.signature()}"
        )
        name = spliced.get(signature)
        if name is None:
            lowered = lower_site(site, plan, implementation, context, signature)
            digest = hashlib.sha256(signature.encode()).hexdigest()[:8]
            wanted = f"{COMPOSITE}.{implementation.name}.{digest}"
            name = binding.splice(module, lowered, wanted)
            spliced[signature] = name
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
    types = [_struct(value) for value in site.values]
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
    name = ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value
    function = module.functions()[name]
    arguments = function.regions[0].blocks[0].arguments
    types = [_struct(value) for value in arguments]
    lowered = lower_site(site, None, implementation, context, None)
    spec = site.spec
    report.verify = verify.verify_texts(
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
    report.reason = (
        f"{implementation.name} differs from the original by "
        f"{report.verify.max_error:.3g} (allowed {report.verify.tolerance:.3g}): "
        "rolled back"
    )
    print(
        f"hlo_tools: {report.id} at {report.location}: {report.reason}", file=sys.stderr
    )
    return False


def _struct(value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape_of(value), _numpy_dtype(dtype_of(value)))


def _numpy_dtype(name: str) -> np.dtype:
    return jax.numpy.dtype(DTYPE_NAMES[name])


def _escapes(op: ir.Operation) -> dict[str, list[str]]:
    attributes = ir.DictAttr(op.attributes["composite_attributes"])
    if "escapes" not in attributes:
        return {}
    escapes = ir.ArrayAttr(attributes["escapes"])
    return {"escapes": [ir.StringAttr(a).value for a in escapes]}


def _report_of(op: ir.Operation, context: PassContext) -> SiteReport:
    """Returns the site's report; a new one for modules outlined elsewhere."""
    attributes = ir.DictAttr(op.attributes["composite_attributes"])
    name = ir.StringAttr(attributes["site"]).value if "site" in attributes else ""
    for site in context.report.sites:
        if site.id == name:
            return site
    number = sum(one.pattern == "attention" for one in context.report.sites)
    site = SiteReport(id=name or f"attention.{number}", pattern="attention")
    context.report.sites.append(site)
    return site
