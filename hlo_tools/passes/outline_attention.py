"""outline-attention: puts a composite in the place of each proven attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jax.extend.mlir import ir

from hlo_tools.matching.attention import AttentionMatch, match_attention
from hlo_tools.matching.canonical import CanonicalSite
from hlo_tools.matching.dependents import terminals
from hlo_tools.matching.gradient import GradMatch
from hlo_tools.matching.hops import Hops
from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.outline import Region, erase_dead
from hlo_tools.matching.products import value_products
from hlo_tools.matching.reader import defining_op, loop_invariant, shape_of
from hlo_tools.matching.sinks import sliced_product
from hlo_tools.module import StableHloModule, source_location
from hlo_tools.pipeline import LEFT_ALONE, PassContext, split_sites
from hlo_tools.report import NearMiss, SiteReport
from hlo_tools.rewriting import walk

COMPOSITE = "hlo_tools.attention"
GRADIENT = "hlo_tools.attention_grad"


@dataclass
class _Outlined:
    """A site that has been replaced by a composite, its backward pass by others."""

    match: AttentionMatch
    region: Region
    composite: ir.OpView
    report: SiteReport
    dependent: set
    unproven: str = ""  # what of its backward pass is not proven, and why
    backward: list[tuple[Region, ir.OpView]] = field(default_factory=list)


@dataclass(frozen=True)
class OutlineAttention:
    """Finds softmax(f(q.k)) v and moves it into a composite's decomposition.

    Options:
      max-rank: largest rank of the scores that is considered.
      min-keys: sites with fewer keys are left alone.
      skip-sites: ids of sites to leave as they are written, joined by "+".
    """

    name: ClassVar[str] = "outline-attention"
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "outline softmax(q.k) v as hlo_tools.attention composites"

    needs: ClassVar[tuple[str, ...]] = (
        "stablehlo.dot_general",
        "stablehlo.exponential",
    )

    max_rank: int = 8
    min_keys: int = 1
    skip_sites: str = ""

    def run(self, module: StableHloModule, context: PassContext) -> bool:
        outlined: list[_Outlined] = []
        misses, seen, done = [], set(), set()
        order = {
            dot.results[0]: number
            for number, dot in enumerate(module.walk("stablehlo.dot_general"))
        }

        def place(product) -> int:
            return order[product[0].operation.results[0]]

        # dead operations stay until the end, so that no handle below goes stale
        for exponential in _outside_kernels(module, "stablehlo.exponential"):
            # the forward pass comes first, and names the products of the backward pass
            for dot, side in sorted(value_products(exponential), key=place):
                result = dot.operation.results[0]
                if (result, side) in seen or result in seen:
                    continue
                seen.add((result, side))
                try:
                    match = match_attention(dot, side, exponential)
                    site = CanonicalSite(match)
                    self._within_limits(match, site)
                except NoMatchError as error:
                    if error.near:
                        misses.append((exponential.results[0], dot, error))
                    continue
                for gradient in match.gradients:
                    seen |= gradient.members & order.keys()
                self._outline(module, site, dot, context, outlined)
                done.add(exponential.results[0])
            sink = sliced_product(exponential)
            if sink is not None:
                misses.append((exponential.results[0], *sink))
        for exponential, dot, error in misses:
            if exponential not in done:
                done.add(exponential)  # its backward pass would only repeat it
                context.report.sites.append(near_miss_report(context, dot, error))
        _report_escapes(outlined)
        return bool(outlined)

    def _outline(self, module, site: CanonicalSite, dot, context, outlined) -> None:
        number = sum(s.pattern == "attention" for s in context.report.sites)
        names = context.names_of(f"attention.{number}")
        if names & split_sites(self.skip_sites):
            context.report.sites.append(_left_alone(number, dot))
        else:
            outlined.append(outline_site(module, site, context))

    def _within_limits(self, match: AttentionMatch, site: CanonicalSite) -> None:
        rank = len(shape_of(match.score.value))
        if rank > self.max_rank:
            raise NoMatchError(
                f"scores of rank {rank} exceed max-rank={self.max_rank}",
                near=True,
                got=f"rank {rank}",
                expected=f"rank {self.max_rank} or less",
                edit=f"run outline-attention{{max-rank={rank}}}",
            )
        if site.spec.k_len < self.min_keys:
            raise NoMatchError(f"{site.spec.k_len} keys are below min-keys")


def _outside_kernels(module: StableHloModule, name: str) -> list[ir.Operation]:
    """Returns operations of the program itself: a bound kernel is not matched again."""
    own = {op.results[0] for op in walk(module.module.operation, (name,))}
    return [op for op in module.walk(name) if op.operation.results[0] in own]


def _left_alone(number: int, dot) -> SiteReport:
    return SiteReport(
        id=f"attention.{number}",
        pattern="attention",
        location=_text(source_location(dot.operation)),
        status="inlined",
        reason=LEFT_ALONE,
    )


def near_miss_report(context: PassContext, dot, error: NoMatchError) -> SiteReport:
    """Returns the report of a candidate that is nearly an attention."""
    number = sum(site.pattern == "attention" for site in context.report.sites)
    op = dot.operation
    where = op
    if error.value is not None and defining_op(error.value) is not None:
        where = defining_op(error.value).operation
    location = source_location(where)
    return SiteReport(
        id=f"attention.{number}",
        pattern="attention",
        location=_text(source_location(op)),
        status="near-miss",
        reason=error.reason,
        near_miss=NearMiss(
            where.name, _text(location), error.got, error.expected, error.edit
        ),
    )


def _text(location) -> str | None:
    return None if location is None else str(location)


def _unproven_text(match: AttentionMatch) -> str:
    if match.unproven is None:
        return ""
    op, why = match.unproven
    return f"{op.name} at {_text(source_location(op)) or 'an unknown line'}: {why}"


def _user_text(op: ir.Operation) -> str:
    """Tells a use of an intermediate: by the program's result, or at a line."""
    if op.name == "func.return":
        return "the program's result"
    return _text(source_location(op)) or op.name


def attributes_of(site: CanonicalSite) -> dict[str, object]:
    """Returns the semantics of a site as plain values, for people and attributes."""
    spec = site.spec
    left, right = spec.window or (None, None)
    found: dict[str, object] = {
        "batch": spec.batch,
        "q_len": spec.q_len,
        "k_len": spec.k_len,
        "heads": spec.kv_heads * spec.group,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "value_dim": spec.value_dim,
        "dtype": spec.q_dtype,
        "named": spec.named,
        "scale": float(spec.scale),
        "causal": spec.causal,
        "offset": spec.offset,
        "has_bias": spec.has_bias,
        "has_mask": spec.has_mask,
    }
    if left is not None:
        found["window_left"] = left
    if right is not None:
        found["window_right"] = right
    if spec.softcap is not None:
        found["softcap"] = float(spec.softcap)
    if spec.mask_fill is not None:
        found["mask_fill"] = float(spec.mask_fill)
    if spec.guarded:
        found["guarded"] = True
    if not spec.named:
        found["score_function"] = site.match.pieces.why
    return found


def _mlir(value: object) -> ir.Attribute:
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
    if isinstance(value, float):
        return ir.FloatAttr.get(ir.F64Type.get(), value)
    return ir.StringAttr.get(str(value))


def outline_site(
    module: StableHloModule, site: CanonicalSite, context: PassContext
) -> _Outlined:
    """Replaces one match by a composite and reports it."""
    match = site.match
    number = sum(one.pattern == "attention" for one in context.report.sites)
    region = Region([match.out], site.values, match.members)
    function_name = _fresh_name(module, f"{COMPOSITE}.{number}")
    region.build_function(function_name, module.module.body)
    attributes = attributes_of(site)
    encoded = {key: _mlir(value) for key, value in attributes.items()}
    encoded["site"] = ir.StringAttr.get(f"attention.{number}")
    dependent = region.depending_on(match.score.value) - {match.out}
    composite = region.replace_by_composite(
        region.place(), COMPOSITE, function_name, encoded
    )
    report = SiteReport(
        id=f"attention.{number}",
        pattern="attention",
        location=_text(source_location(match.value_product.operation)),
        status="outlined",
        attributes=attributes,
        reason="outlined; no pass has bound it",
    )
    context.report.sites.append(report)
    unproven = _unproven_text(match)
    outlined = _Outlined(match, region, composite, report, dependent, unproven)
    for gradient in match.gradients:
        try:
            half = _outline_gradient(module, site, gradient, report)
            outlined.backward.append(half)
        except NoMatchError as error:
            report.attributes["backward"] = error.reason
    return outlined


def _outline_gradient(
    module: StableHloModule,
    site: CanonicalSite,
    gradient: GradMatch,
    report: SiteReport,
) -> tuple[Region, ir.OpView]:
    """Replaces one backward pass by a composite."""
    # both halves are to read the same operands: neither computes one from another
    members = gradient.members - {loop_invariant(value) for value in site.values}
    region = Region([o.value for o in gradient.outputs], [], members)
    anchor = region.place()
    number = report.id.partition(".")[2]
    function_name = _fresh_name(module, f"{GRADIENT}.{number}")
    region.build_function(function_name, module.module.body)
    wanted = [
        o.wanted if isinstance(o.wanted, str) else "side" for o in gradient.outputs
    ]
    attributes = {
        "site": ir.StringAttr.get(report.id),
        "wanted": ir.ArrayAttr.get([ir.StringAttr.get(name) for name in wanted]),
        "recomputes": ir.BoolAttr.get(gradient.recomputes),
    }
    where = _text(source_location(defining_op(region.outs[0]).operation))
    composite = region.replace_by_composite(anchor, GRADIENT, function_name, attributes)
    report.gradient = {"wanted": wanted, "location": where, "bound": False}
    return region, composite


def _fresh_name(module: StableHloModule, name: str) -> str:
    taken = module.functions()
    number = 0
    while f"{name}.{number}" in taken or (not number and name in taken):
        number += 1
    return f"{name}.{number}" if number else name


def _report_escapes(outlined: list[_Outlined]) -> None:
    """Erases what became dead and notes intermediates that are used elsewhere."""
    regions = [one.region for one in outlined]
    behind = [region for one in outlined for region, _ in one.backward]
    alive = erase_dead([*regions, *behind])
    hops = Hops()
    for one, living in zip(outlined, alive, strict=False):
        own = {composite.operation.results[0] for _, composite in one.backward}
        inside = {defining_op(value).operation.results[0] for value in living}
        users = [
            op
            for op in terminals(hops, living & one.dependent)
            if not (len(op.results) and op.results[0] in own | inside)
        ]
        if not users:
            continue
        where = sorted({_user_text(op) for op in users})
        one.report.attributes["escapes"] = where
        escapes = ir.ArrayAttr.get([ir.StringAttr.get(text) for text in where])
        old = one.composite.attributes["composite_attributes"]
        named = {name.name: name.attr for name in ir.DictAttr(old)}
        named["escapes"] = escapes
        if one.unproven:
            named["unproven"] = ir.StringAttr.get(one.unproven)
        one.composite.attributes["composite_attributes"] = ir.DictAttr.get(named)
