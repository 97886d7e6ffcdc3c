"""Passes in a row: a textual spec that parses and prints back, and a timed run."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from jax.extend.mlir import ir

from hlo_tools.errors import PassSpecError, UnknownNameError
from hlo_tools.module import StableHloModule
from hlo_tools.passes import ALIASES, PASSES
from hlo_tools.report import PassReport, RewriteReport
from hlo_tools.targets import Target

# Other packages add passes by name: name -> "module.path:ClassName".
ENTRY_POINTS = "hlo_tools.passes"
EXACTNESS = ("bitwise", "reassociating", "approximate")


@dataclass
class PassContext:
    """What a pass may ask while it runs.

    Attributes:
      target: the device that the module is for.
      report: filled in by the passes.
      exactness: the loosest kind of rewrite that the user allows.
      verify: whether bound sites are checked numerically.
      skip_sites: ids of sites that are not to be bound, see `leaves_alone`.
      only_sites: if not empty, the ids of all sites that may be bound.
      strict: whether an error at one site ends the run; else it costs that site.
    """

    target: Target
    report: RewriteReport
    exactness: str = "reassociating"
    verify: bool = False
    skip_sites: frozenset[str] = frozenset()
    only_sites: frozenset[str] = frozenset()
    strict: bool = False

    def allows(self, exactness: str) -> bool:
        """Returns whether rewrites of this exactness may be made."""
        return EXACTNESS.index(exactness) <= EXACTNESS.index(self.exactness)

    def leaves_alone(self, site: str, skip: str = "", only: str = "") -> bool:
        """Returns whether a site was asked to be left as it is.

        A site goes by its id, or by its module's name and its id as in the report of
        a whole program: "attention.3", "jit_step/attention.3".

        Args:
          site: its id; ids follow program order, so they are the same in every run.
          skip: a pass's own option, ids joined by "+"; they are added to `skip_sites`.
          only: the same for `only_sites`.
        """
        names = self.names_of(site)
        if names & (self.skip_sites | split_sites(skip)):
            return True
        allowed = self.only_sites | split_sites(only)
        return bool(allowed) and not names & allowed

    def names_of(self, site: str) -> frozenset[str]:
        """Returns what a site can be asked for by; see `leaves_alone`."""
        return frozenset({site, f"{self.report.module}/{site}"})


LEFT_ALONE = "left alone on request"


def split_sites(text: str) -> frozenset[str]:
    """Returns the site ids in "attention.0+attention.7"; commas do as well."""
    return frozenset(text.replace("+", " ").replace(",", " ").split())


@runtime_checkable
class Pass(Protocol):
    """A frozen dataclass; its fields are the options that a spec can set."""

    name: ClassVar[str]
    exactness: ClassVar[str]
    summary: ClassVar[str]

    def run(self, module: StableHloModule, context: PassContext) -> bool:
        """Changes `module` in place; returns whether it did."""
        ...


def load_pass(name: str) -> type:
    """Returns the class of a pass.

    Args:
      name: as in the table of passes, or that of an installed entry point of the group
        "hlo_tools.passes", or "module.path:ClassName" for one's own.

    Raises:
      UnknownNameError: there is none; the message lists the closest names.
      PassSpecError: a pass of one's own can not be imported, or is none.
    """
    if ":" in name:
        return _load_custom(name)
    if name not in PASSES:
        installed = importlib.metadata.entry_points(group=ENTRY_POINTS)
        if name in installed.names:
            return _load_custom(installed[name].value)
        raise UnknownNameError("pass", name, [*PASSES, *ALIASES, *installed.names])
    module, _, attribute = PASSES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _load_custom(place: str) -> type:
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's module raises
        kind = type(error).__name__
        raise PassSpecError(f"can not import the pass {place}: {kind}: {error}") from (
            error
        )
    missing = [
        what
        for what in ("name", "exactness", "summary", "run")
        if not hasattr(found, what)
    ]
    if not dataclasses.is_dataclass(found) or not isinstance(found, type):
        raise PassSpecError(f"{place} is no pass: expected a frozen dataclass")
    if missing:
        raise PassSpecError(f"{place} is no pass: it lacks {', '.join(missing)}")
    if found.exactness not in EXACTNESS:
        raise PassSpecError(
            f"{place}: got exactness {found.exactness!r}, "
            f"expected one of {', '.join(EXACTNESS)}"
        )
    return found


def stands_alone(one: Pass) -> bool:
    """Returns whether a change by a pass is worth it where nothing is bound.

    Most passes prepare a program for binding, and what they did is thrown away if no
    site is bound: XLA then gets what JAX made. What a pass with the class attribute
    ``stands_alone = True`` did is kept.
    """
    return bool(getattr(one, "stands_alone", False))


def spelling(one: Pass) -> str:
    """Returns how a spec names a pass, without its options."""
    cls = type(one)
    if one.name in PASSES and load_pass(one.name) is cls:
        return one.name
    return f"{cls.__module__}:{cls.__qualname__}"


def _option_name(field_name: str) -> str:
    return field_name.replace("_", "-")


def _parse_value(text: str, default: Any, where: str) -> Any:
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise PassSpecError(f"{where}: got {text!r}, expected true or false")
        return text == "true"
    try:
        return type(default)(text)
    except ValueError:
        kind = type(default).__name__
        raise PassSpecError(f"{where}: got {text!r}, expected {kind}") from None


def _print_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def make_pass(name: str, options: dict[str, str]) -> Pass:
    """Returns a pass with options given as text.

    Raises:
      UnknownNameError: no such pass or option.
      PassSpecError: an option's value does not parse.
    """
    cls = load_pass(name)
    fields = {_option_name(f.name): f for f in dataclasses.fields(cls)}
    values = {}
    for option, text in options.items():
        if option not in fields:
            raise UnknownNameError(f"option of {name}", option, list(fields))
        found = fields[option]
        values[found.name] = _parse_value(text, found.default, f"{name}{{{option}}}")
    return cls(**values)


_ITEM = re.compile(
    r"\s*(?P<name>[A-Za-z_][\w.]*:[A-Za-z_]\w*|[A-Za-z0-9_-]+)"
    r"\s*(?:\{(?P<options>[^{}]*)\})?\s*"
)


def _items(spec: str) -> Iterator[tuple[str, dict[str, str]]]:
    position = 0
    while position < len(spec):
        found = _ITEM.match(spec, position)
        if found is None or found.end() == position:
            raise PassSpecError(
                f"can not read the pass spec at column {position + 1}: "
                f"{spec[position : position + 20]!r}; write e.g. "
                "normalize,outline-attention{max-rank=5}"
            )
        options = {}
        for pair in (found["options"] or "").replace(",", " ").split():
            option, equals, value = pair.partition("=")
            options[option] = value if equals else "true"
        yield found["name"], options
        position = found.end()
        if position < len(spec):
            if spec[position] != ",":
                raise PassSpecError(
                    f"expected a comma at column {position + 1} of the pass spec, "
                    f"got {spec[position]!r}"
                )
            position += 1


@dataclass(frozen=True)
class PassPipeline:
    """Passes that run one after the other.

    Attributes:
      passes: the passes, aliases expanded.
      spec: the text it was parsed from, or "".
    """

    passes: tuple[Pass, ...]
    spec: str = field(default="", compare=False)

    @classmethod
    def parse(cls, spec: str) -> PassPipeline:
        """Parses "name{option=value ...},name,..."; aliases stand for several.

        A pass that is in no table goes by "module.path:ClassName{option=value ...}".

        Raises:
          PassSpecError: the text is malformed, or a pass can not be imported.
          UnknownNameError: no such pass or option.
        """
        passes: list[Pass] = []
        for name, options in _items(spec):
            if name in ALIASES:
                if options:
                    raise PassSpecError(f"{name} stands for several passes: no options")
                passes.extend(cls.parse(ALIASES[name]).passes)
            else:
                passes.append(make_pass(name, options))
        return cls(tuple(passes), spec)

    def __str__(self) -> str:
        items = []
        for one in self.passes:
            changed = [
                f"{_option_name(f.name)}={_print_value(getattr(one, f.name))}"
                for f in dataclasses.fields(one)  # type: ignore[arg-type]
                if getattr(one, f.name) != f.default
            ]
            items.append(
                spelling(one) + (f"{{{' '.join(changed)}}}" if changed else "")
            )
        return ",".join(items)

    def may_apply(self, module: ir.Module) -> bool:
        """Returns whether any outlining pass could find something in a module.

        A pass with the class attribute ``needs`` (operation names) can do nothing
        in a module without them.  Most modules of a program have no such
        operations, and are not worth a copy.  A pass that stands alone may apply to
        any module.
        """
        if any(stands_alone(one) for one in self.passes):
            return True
        needs = [set(one.needs) for one in self.passes if hasattr(one, "needs")]
        if not needs:
            return True
        wanted = set().union(*needs)
        found: set[str] = set()

        def visit(op: ir.Operation) -> ir.WalkResult:
            if op.name in wanted:
                found.add(op.name)
                if any(one <= found for one in needs):
                    return ir.WalkResult.INTERRUPT
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
        return any(one <= found for one in needs)

    def did_something(self, report: RewriteReport) -> bool:
        """Returns whether a run is worth handing on: a site bound, or a pass that
        stands alone with a change."""
        if any(site.status == "bound" for site in report.sites):
            return True
        alone = {spelling(one) for one in self.passes if stands_alone(one)}
        return any(one.changed and one.name in alone for one in report.passes)

    def run(self, module: StableHloModule, context: PassContext) -> bool:
        """Runs the passes on `module`, in place; returns whether any changed it.

        A pass looser than the context's exactness is skipped, with a note in the
        report.
        """
        changed_any = False
        count = module.op_count()
        with module.context, ir.Location.unknown(module.context):
            for one in self.passes:
                if not context.allows(one.exactness):
                    context.report.notes.append(
                        f"{one.name} skipped: it is {one.exactness}, "
                        f"and only {context.exactness} rewrites are allowed"
                    )
                    continue
                start = time.perf_counter()
                changed = one.run(module, context)
                seconds = time.perf_counter() - start
                before, count = count, module.op_count() if changed else count
                context.report.passes.append(
                    PassReport(spelling(one), seconds, before, count, changed)
                )
                changed_any |= changed
        return changed_any
