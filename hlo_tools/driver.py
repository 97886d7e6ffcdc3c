"""One entry for every way in: a module, a target and a configuration."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jaxlib.version
from jax.extend.mlir import ir

from hlo_tools.module import StableHloModule
from hlo_tools.pipeline import PassContext, PassPipeline, split_sites
from hlo_tools.report import RewriteReport
from hlo_tools.targets import Target
from hlo_tools.version import __version__


@dataclass(frozen=True)
class StageConfig:
    """What the stage is asked to do.

    Attributes:
      passes: pipeline spec.
      exactness: "bitwise", "reassociating" or "approximate".
      verify: whether bound sites are checked numerically on the device at hand.
      skip_sites: ids of sites that are left to XLA.
      only_sites: if not empty, the ids of all sites that may be bound.
    """

    passes: str = "default"
    exactness: str = "reassociating"
    verify: bool = False
    skip_sites: tuple[str, ...] = ()
    only_sites: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StageConfig:
        fields = json.loads(text)
        sites = {name: tuple(fields[name]) for name in fields if "sites" in name}
        return cls(**{**fields, **sites})

    def with_environment(self, environment: Mapping[str, str]) -> StageConfig:
        """Returns the configuration with what the environment asks for instead.

        HLO_TOOLS_PASSES is a pipeline spec; HLO_TOOLS_SKIP_SITES and
        HLO_TOOLS_ONLY_SITES are ids joined by "+" or commas. An empty value of the
        latter two means nothing.
        """
        changes: dict[str, Any] = {}
        if "HLO_TOOLS_PASSES" in environment:
            changes["passes"] = environment["HLO_TOOLS_PASSES"]
        for name in ("skip_sites", "only_sites"):
            ids = split_sites(environment.get(f"HLO_TOOLS_{name.upper()}", ""))
            if ids:
                changes[name] = tuple(sorted({*getattr(self, name), *ids}))
        return replace(self, **changes)


def new_report(name: str, target: Target) -> RewriteReport:
    """Returns the report of a module before any pass has run."""
    report = RewriteReport(module=name, target=target.spec.name)
    report.versions = {
        "hlo_tools": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
    }
    return report


def run_passes(
    module: StableHloModule,
    passes: str,
    target: Target,
    exactness: str = "reassociating",
    verify: bool = False,
    skip_sites: Collection[str] = (),
    only_sites: Collection[str] = (),
    strict: bool = False,
) -> tuple[StableHloModule, RewriteReport]:
    """Runs a pipeline on a module, in place; see `StageConfig` for the settings.

    With `strict`, an error at one site is raised, as it is, instead of costing that
    site alone.

    Returns:
      The module and the report.

    Raises:
      PassSpecError, UnknownNameError: the spec is bad.
    """
    pipeline = PassPipeline.parse(passes)
    report = new_report(module.name, target)
    start = time.perf_counter()
    skip, only = frozenset(skip_sites), frozenset(only_sites)
    context = PassContext(target, report, exactness, verify, skip, only, strict)
    pipeline.run(module, context)
    report.seconds = time.perf_counter() - start
    return module, report


def transform(
    ir_module: ir.Module, target: Target, config: StageConfig
) -> tuple[ir.Module, RewriteReport]:
    """Rewrites a module that JAX is about to compile.

    Args:
      ir_module: not changed: JAX may compile it again.
      target: the device it is for.
      config: what to do.

    Returns:
      A new module, and the report. It is `ir_module` itself when nothing was bound and
      no pass that stands alone (see `pipeline.stands_alone`) changed anything.
    """
    pipeline = PassPipeline.parse(config.passes)
    if not pipeline.may_apply(ir_module):
        report = new_report(StableHloModule(ir_module).name, target)
        return ir_module, report
    module = StableHloModule.from_ir(ir_module)
    module, report = run_passes(
        module,
        config.passes,
        target,
        config.exactness,
        config.verify,
        config.skip_sites,
        config.only_sites,
    )
    kept = pipeline.did_something(report)
    return (module.module if kept else ir_module), report


def rewrite_text(mlir: str, *, passes: str = "default", target: str = "cpu") -> str:
    """Runs a pipeline on the text of a StableHLO module.

    Args:
      mlir: MLIR text.
      passes: pipeline spec, e.g. "normalize,outline-attention".
      target: name of the target ("cpu", "h200", "v5e", ...).

    Returns:
      The text of the rewritten module.

    Raises:
      MlirParseError: `mlir` does not parse.
      PassSpecError, UnknownNameError: the spec or the target is bad.
    """
    module = StableHloModule.parse(mlir)
    run_passes(module, passes, Target.parse(target))
    return module.as_text()
