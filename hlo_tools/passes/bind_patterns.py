"""bind-patterns: computes outlined sites of users' patterns by their replacements."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

from hlo_tools import binding, verify
from hlo_tools.errors import describe_error
from hlo_tools.module import StableHloModule
from hlo_tools.passes.bind_pairs import struct_of
from hlo_tools.passes.composite_attributes import callee_of, name_of, site_of
from hlo_tools.patterns import Pattern, patterns
from hlo_tools.pipeline import LEFT_ALONE, PassContext
from hlo_tools.report import SiteReport, VerifyResult
from hlo_tools.verify_program import verify_texts

_LARGEST_INTEGER = 7  # of random inputs: small indices


@dataclass(frozen=True)
class BindPatterns:
    """Calls replacements in the place of the composites of patterns."""

    name: ClassVar[str] = "bind-patterns"
    exactness: ClassVar[str] = "reassociating"
    summary: ClassVar[str] = "bind the composites of users' patterns to replacements"

    def run(self, module: StableHloModule, context: PassContext) -> bool:
        sites: dict[str, list[ir.Operation]] = defaultdict(list)
        for op in module.walk("stablehlo.composite"):
            if "pattern" in _attributes(op):
                sites[site_of(op)].append(op)
        known = {one.name: one for one in patterns()}
        bound = 0
        for site, ops in sites.items():
            name = ir.StringAttr(_attributes(ops[0])["pattern"]).value
            report = _report_of(context, site, name)
            if name not in known:
                report.reason = f"no pattern {name} is registered here"
            else:
                bound += _bind(module, ops, known[name], report, context)
        return bound > 0


def _attributes(op: ir.Operation) -> ir.DictAttr:
    return ir.DictAttr(op.attributes["composite_attributes"])


def _integers(op: ir.Operation, name: str) -> list[int]:
    found = ir.ArrayAttr(_attributes(op)[name])
    return [ir.IntegerAttr(one).value for one in found]


def _report_of(context: PassContext, site: str, pattern: str) -> SiteReport:
    for one in context.report.sites:
        if one.id == site:
            return one
    report = SiteReport(id=site, pattern=pattern, status="outlined")
    context.report.sites.append(report)
    return report


def _bind(module, ops, pattern: Pattern, report: SiteReport, context) -> bool:
    """Binds all halves of a site, or none; returns whether it did."""
    if pattern.replacement is None:
        report.reason = "outlined, nothing bound: the pattern has no replacement"
        return False
    if context.leaves_alone(report.id):
        report.reason = LEFT_ALONE
        return False
    types = _argument_types(ops[0])[: len(pattern.types)]
    try:
        if pattern.when is not None and not pattern.when(*pattern.unflatten(types)):
            report.reason = "the pattern's `when` says no"
            return False
        lowered = [_lower(op, pattern, context) for op in ops]
        why = _unfit(module, ops, lowered)
        if why is not None:
            report.reason = why
            return False
        if context.verify and not _verified(module, ops, lowered, report, context):
            return False
    except Exception as error:  # whatever a replacement raises costs this site alone
        if context.strict:
            raise
        report.status = "failed"
        report.reason = f"binding it failed: {describe_error(error)}"
        verify.announce(report)
        return False
    for op, one in zip(ops, lowered, strict=True):
        _call(module, op, one)
    report.status, report.implementation = "bound", pattern.name
    report.reason = "the pattern's replacement"
    if report.gradient is not None:
        report.gradient["bound"] = True
    return True


def _argument_types(op: ir.Operation) -> list[Any]:
    types = [struct_of(operand) for operand in op.operands]
    places = zip(_integers(op, "arguments"), _integers(op, "squeezed"), strict=True)
    return [_squeezed(types[place]) if made else types[place] for place, made in places]


def _squeezed(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct([n for n in one.shape if n != 1], one.dtype)


def _lower(op, pattern: Pattern, context) -> binding.Lowered:
    """Lowers the replacement's half, as a function of the composite's operands."""
    places, outs = _integers(op, "arguments"), _integers(op, "outs")
    types = _argument_types(op)
    half = ir.StringAttr(_attributes(op)["half"]).value
    assert pattern.replacement is not None
    if half == "forward":
        whole = pattern.flat(pattern.replacement)
    else:
        whole = pattern.backward(pattern.replacement, types[: len(pattern.types)])

    def function(*operands):
        given = [operands[place] for place in places]
        results = whole(
            *(a.reshape(t.shape) for a, t in zip(given, types, strict=True))
        )
        return tuple(results[number] for number in outs)

    platform = binding.PLATFORM_NAMES[context.target.platform]
    given = [struct_of(operand) for operand in op.operands]
    return binding.lower_function(function, given, platform, None)


def _unfit(module, ops, lowered) -> str | None:
    """Returns why the lowered halves can not be put into the program."""
    for op, one in zip(ops, lowered, strict=True):
        got = [(tuple(t.shape), str(t.dtype)) for t in one.results]
        types = [struct_of(result) for result in op.results]
        want = [(tuple(t.shape), str(t.dtype)) for t in types]
        if got != want:
            return f"the replacement returns {got}, and the site {want}"
        if module.partitions > 1 and "stablehlo.custom_call" in one.text:
            return "the program is partitioned, and the replacement has custom calls"
    return None


def _verified(module, ops, lowered, report: SiteReport, context) -> bool:
    """Compares each half with its reference; returns whether all agree."""
    platform = context.target.platform
    if not verify.can_run(platform):
        context.report.notes.append(f"{report.id} not verified: no {platform} here")
        return True
    results: list[VerifyResult] = []
    for op, one in zip(ops, lowered, strict=True):
        types = [struct_of(operand) for operand in op.operands]
        every = [*types, *one.results]
        floats = sorted({str(t.dtype) for t in every if "float" in str(t.dtype)})
        backward = ir.StringAttr(_attributes(op)["half"]).value == "backward"
        tolerance = verify.tolerance_of(floats, platform, backward) if floats else 0.0
        text = verify.module_of_function(module.functions()[callee_of(op)])
        places = list(range(len(types)))
        results.append(
            verify_texts(
                text, one.text, types, places, platform, tolerance, _LARGEST_INTEGER
            )
        )
    report.verify = verify.worst(results)
    if report.verify.passed:
        return True
    report.status = "failed"
    report.reason = verify.rolled_back(report.pattern, report.verify)
    verify.announce(report)
    return False


def _call(module, op: ir.Operation, lowered: binding.Lowered) -> None:
    """Puts a call in the place of a composite."""
    name = binding.splice(module, lowered, f"{name_of(op)}.replacement")
    with ir.InsertionPoint(op), op.location:
        call = func.CallOp(
            [result.type for result in op.results],
            ir.FlatSymbolRefAttr.get(name),
            list(op.operands),
        )
    for old, new in zip(op.results, call.results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()
