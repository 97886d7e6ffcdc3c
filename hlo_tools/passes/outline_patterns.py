"""outline-patterns: puts composites in the place of what users' references compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.extend.mlir import ir

from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.outline import Region, erase_dead
from hlo_tools.matching.pattern_sites import Finder, Half, size_of, type_key
from hlo_tools.matching.reader import loop_invariant
from hlo_tools.module import StableHloModule, source_location
from hlo_tools.patterns import Pattern, patterns
from hlo_tools.pipeline import PassContext
from hlo_tools.report import NearMiss, SiteReport
from hlo_tools.rewriting import producer, users, walk

# A comparison that got this far is worth telling about.
_NEAR_PART, _NEAR_OPS = 0.5, 3
_FREE = frozenset(
    f"stablehlo.{n}" for n in "constant iota broadcast_in_dim reshape".split()
)


@dataclass
class _Site:
    """The forward half of a pattern, and the backward halves of the same arguments."""

    forward: Half
    backward: list[Half]


@dataclass(frozen=True)
class OutlinePatterns:
    """Finds what the references of registered patterns compute.

    Options:
      only: names of the patterns to look for, joined by "+"; all if empty.
    """

    name: ClassVar[str] = "outline-patterns"
    # sums and products are compared in any order
    exactness: ClassVar[str] = "bitwise"
    summary: ClassVar[str] = "outline what users' patterns describe as composites"

    only: str = ""

    @property
    def needs(self) -> tuple[str, ...]:
        """Without patterns there is nothing to find in any module."""
        return ("func.return",) if self._patterns() else ("no pattern is registered",)

    def _patterns(self) -> list[Pattern]:
        return patterns(self.only.split("+") if self.only else ())

    def run(self, module: StableHloModule, context: PassContext) -> bool:
        found = [_Search(module, context, one).run() for one in self._patterns()]
        return any(found)


class _Search:
    """One pattern in one module."""

    def __init__(self, module: StableHloModule, context: PassContext, one: Pattern):
        self.module, self.context, self.pattern = module, context, one
        self.by_name: dict[str, list[ir.Operation]] = {}
        for op in walk(module.module.operation):
            if len(op.results) == 1:
                self.by_name.setdefault(op.name, []).append(op)
        self.finder = Finder(self.by_name)
        self.gradients = Finder(self.by_name)  # its near misses are not told
        self.taken: set = set()
        self.regions: list[Region] = []
        self.renamed: dict[Any, Any] = {}  # results of sites replaced already

    def run(self) -> bool:
        sites = list(self._sites())
        for site in sites:
            self._outline(site)
        self._near_misses()
        erase_dead(self.regions)
        return bool(self.regions)

    # --------------------------------------------------------------------- finding

    def _sites(self) -> Iterator[_Site]:
        for kind in ("forward", "primal"):
            for traced in self.pattern.variants(kind):
                sizes = [size_of(out) for out in traced.outs]
                main = sizes.index(max(sizes))
                retrace = self._retrace(kind)
                found = self.finder.find(traced, main, retrace, None, self.taken)
                for half in found:
                    if half.members & self.taken or not self._others(
                        traced, main, half, retrace
                    ):
                        continue
                    self.taken |= half.members
                    yield _Site(half, self._backward(half))

    def _others(self, traced, main: int, half: Half, retrace) -> bool:
        """Finds the other results; returns whether all that are computed were."""
        for number in range(len(traced.outs)):
            if number == main:
                continue
            more = next(self.finder.find(traced, number, retrace, half.arguments), None)
            if more is None:
                return False
            half.outs |= more.outs
            half.members |= more.members
        return True

    def _backward(self, forward: Half) -> list[Half]:
        """Returns the backward halves that belong to a forward one."""
        types = [
            _struct(type_key(forward.arguments[n]))
            for n in range(len(forward.arguments))
        ]
        if not any(jax.numpy.issubdtype(t.dtype, jax.numpy.inexact) for t in types):
            return []
        # the reference at the site's own sizes: cotangents are all that is unknown
        traced = self.pattern.traced("backward", types)
        if traced is None:
            return []
        retrace = self._retrace("backward")
        sizes = [size_of(out) for out in traced.outs]
        halves: list[Half] = []
        for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
            known = halves or [Half(dict(forward.arguments))]
            for half in known:
                more = next(
                    self.gradients.find(traced, number, retrace, half.arguments), None
                )
                if more is None and self.context.allows("reassociating"):
                    more = self.gradients.partial_sum(
                        traced, number, retrace, half.arguments
                    )
                if more is None:
                    continue
                half.arguments = more.arguments
                half.outs |= more.outs
                half.members |= more.members
                if half not in halves:
                    halves.append(half)
        return halves

    def _retrace(self, kind: str):
        count = len(self.pattern.types)

        def retrace(keys: list[Any]):
            if len(keys) < count or None in keys or any(k[1] is None for k in keys):
                return None
            traced = self.pattern.traced(kind, [_struct(k) for k in keys[:count]])
            if traced is None or len(traced.types) != len(keys):
                return None
            got = [(tuple(t.shape), str(t.dtype)) for t in traced.types]
            return traced if got == keys else None

        return retrace

    # ------------------------------------------------------------------- replacing

    def _outline(self, site: _Site) -> None:
        report = self._report(site)
        try:
            self._check_escapes(site)
            # the backward half may read the forward results: while they are there
            halves = [("backward", half) for half in site.backward]
            halves.append(("forward", site.forward))
            for kind, half in halves:
                self._replace(kind, half, report)
        except NoMatchError as error:
            where = error.value if error.value is not None else None
            op = None if where is None else producer(where)
            report.status, report.reason = "near-miss", error.reason
            report.near_miss = NearMiss(
                "an argument" if op is None else op.name,
                None if op is None else _text(op),
                error.got,
                error.expected,
                error.edit,
            )

    def _report(self, site: _Site) -> SiteReport:
        name = self.pattern.name
        number = sum(s.pattern == name for s in self.context.report.sites)
        out = producer(next(iter(site.forward.outs.values())))
        report = SiteReport(
            id=f"{name}.{number}",
            pattern=name,
            location=None if out is None else _text(out),
            status="outlined",
            reason="outlined; no pass has bound it",
            attributes={"arguments": ", ".join(
                str(v.type) for _, v in sorted(site.forward.arguments.items()))},
        )  # fmt: skip
        if site.backward:
            wanted = sorted(n for half in site.backward for n in half.outs)
            report.gradient = {
                "wanted": [str(n) for n in wanted],
                "location": None,
                "bound": False,
            }
        self.context.report.sites.append(report)
        return report

    def _check_escapes(self, site: _Site) -> None:
        """Refuses a site whose intermediate values are used by something else."""
        halves = [site.forward, *site.backward]
        inside = set().union(*(half.members for half in halves))
        outs = {value for half in halves for value in half.outs.values()}
        given = {v for half in halves for v in half.arguments.values()}
        for value in inside - outs - given:
            op = producer(value)
            if op is None or op.name in _FREE:
                continue
            for user in users(value):
                results = list(user.results)
                if results and (results[0] in inside or not _is_used(results[0])):
                    continue
                raise NoMatchError(
                    "an intermediate value is used outside the site: by "
                    f"{_text(user) or user.name}",
                    near=True,
                    value=value,
                    got=f"a use by {user.name}",
                    expected="uses within the site only",
                    edit="make it a result of the pattern, or do not use it",
                )

    def _replace(self, kind: str, half: Half, report: SiteReport) -> None:
        numbers = sorted(half.outs)
        count = len(half.arguments)
        found = [loop_invariant(half.arguments[n]) for n in range(count)]
        found = [self.renamed.get(value, value) for value in found]
        # what was made for the proof alone: the program uses it with its unit dims
        squeezed = [int(_is_made(value)) for value in found]
        arguments = [
            self._source(value) if made else value
            for value, made in zip(found, squeezed, strict=True)
        ]
        unique = list(dict.fromkeys(arguments))
        members = half.members | set(half.outs.values())
        region = Region([half.outs[n] for n in numbers], unique, members - set(unique))
        anchor = region.place()
        name = f"hlo_tools.{self.pattern.name}"
        function_name = self._fresh(f"{name}.{kind}")
        region.build_function(function_name, self.module.module.body)
        i64 = ir.IntegerType.get_signless(64)

        def integers(values):
            return ir.ArrayAttr.get([ir.IntegerAttr.get(i64, n) for n in values])

        composite = region.replace_by_composite(
            anchor,
            name,
            function_name,
            {
                "site": ir.StringAttr.get(report.id),
                "pattern": ir.StringAttr.get(self.pattern.name),
                "half": ir.StringAttr.get(kind),
                "outs": integers(numbers),
                "squeezed": integers(squeezed),
                "arguments": integers([unique.index(a) for a in arguments]),
            },
        )
        self.renamed |= zip(region.outs, composite.results, strict=True)
        self.regions.append(region)

    def _source(self, value: Any) -> Any:
        op = producer(value)
        assert op is not None
        source = loop_invariant(op.operands[0])
        return self.renamed.get(source, source)

    def _fresh(self, name: str) -> str:
        taken = self.module.functions()
        number = 0
        while f"{name}.{number}" in taken:
            number += 1
        return f"{name}.{number}"

    # ----------------------------------------------------------------- near misses

    def _near_misses(self) -> None:
        best: tuple[float, Any, Any] | None = None
        for value, (difference, size) in self.finder.near.items():
            if value in self.taken or difference.value in self.taken:
                continue
            part = difference.matched / max(size, 1)
            enough = difference.matched >= _NEAR_OPS and part >= _NEAR_PART
            if enough and (best is None or part > best[0]):
                best = part, value, difference
        if best is None:
            return
        _, value, difference = best
        name = self.pattern.name
        number = sum(s.pattern == name for s in self.context.report.sites)
        op, where = producer(value), producer(difference.value)
        self.context.report.sites.append(
            SiteReport(
                id=f"{name}.{number}",
                pattern=name,
                location=None if op is None else _text(op),
                status="near-miss",
                reason=f"{difference.matched} operations match, then the program has "
                f"{difference.got} where the reference has {difference.expected}",
                near_miss=NearMiss(
                    "an argument" if where is None else where.name,
                    None if where is None else _text(where),
                    difference.got,
                    difference.expected,
                    "write it as the reference does, or register this form too",
                ),
            )
        )


def _struct(key: tuple) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(key[0], jax.numpy.dtype(key[1]))


def _is_made(value: Any) -> bool:
    return producer(value, "stablehlo.reshape") is not None and not list(value.uses)


def _is_used(value: Any) -> bool:
    """Returns whether a value has a use that is not dead itself."""
    return any(
        not len(user.results) or any(_is_used(result) for result in user.results)
        for user in users(value)
    )


def _text(op: ir.Operation) -> str | None:
    location = source_location(op)
    return None if location is None else str(location)
