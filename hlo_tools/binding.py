"""Chooses an implementation for a site, and puts it into the module.

Implementations are JAX functions.  One is lowered by itself for the target's
platform, its module spliced into the program as private functions, and called
in the place of the composite.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.mlir import ir

from hlo_tools.composites import AttentionSpec, Implementation
from hlo_tools.gradients import GradSpec
from hlo_tools.module import StableHloModule
from hlo_tools.report import BASELINE, Candidate
from hlo_tools.targets import Target

# composite -> implementation -> "module:attribute"; loaded on demand.  Others can
# be added through the entry point group of the same name.
IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "hlo_tools.attention": {
        "online": "pallas_kernels.attention.online:IMPLEMENTATION",
        "cudnn": "pallas_kernels.attention.cudnn:IMPLEMENTATION",
        "mosaic-gpu": "pallas_kernels.attention.gpu_binding:IMPLEMENTATION",
        "tpu-flash": "pallas_kernels.attention.tpu:IMPLEMENTATION",
    }
}
# composite -> module with naive_seconds(spec, target), naive_temp_bytes(...)
COST_MODELS = {"hlo_tools.attention": "pallas_kernels.attention.cost"}
# the same for a site with its backward pass: naive_grad_seconds(spec, grad, target) ...
GRAD_COST_MODELS = {"hlo_tools.attention": "pallas_kernels.attention.cost_grad"}
# composite -> guarded(implementation, spec), which makes one fit for a guarded site
GUARDS = {"hlo_tools.attention": "pallas_kernels.attention.guard:guarded"}

# An implementation must be predicted to take at most this part of XLA's time ...
FASTER = 0.95
# ... or save at least this much memory while taking at most this multiple of it.
MATTERING_BYTES = 64 << 20
MATTERING_SLOWDOWN = 1.10


@functools.cache
def load_implementations(composite: str) -> dict[str, Implementation]:
    """Returns the implementations of a composite, by name."""
    rows = dict(IMPLEMENTATIONS.get(composite, {}))
    for entry in importlib.metadata.entry_points(group=composite):
        rows.setdefault(entry.name, entry.value)
    return {name: _load(place) for name, place in rows.items()}


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Choice:
    """What a site is to be bound to.

    Attributes:
      implementation: None to keep XLA's own code.
      reason: why, as a sentence.
      candidates: every implementation considered, XLA's own last.
      bytes_saved: temporary memory saved by one execution.
    """

    implementation: Implementation | None
    reason: str
    candidates: list[Candidate]
    bytes_saved: int = 0


def choose(
    composite: str, spec: AttentionSpec, target: Target, grad: GradSpec | None = None
) -> Choice:
    """Chooses the implementation that is predicted to be fastest for a site.

    XLA's own code stays unless something is predicted to be faster, or saves
    memory that matters at about the same speed.

    Args:
      composite: its name.
      spec: the site.
      target: what it runs on.
      grad: its backward pass, to be bound with it; None for the forward pass alone.
    """
    parts: tuple[Any, ...] = (spec, target)
    if grad is None:
        cost = importlib.import_module(COST_MODELS[composite])
        baseline, baseline_bytes = cost.naive_seconds, cost.naive_temp_bytes
    else:
        parts = (spec, grad, target)
        cost = importlib.import_module(GRAD_COST_MODELS[composite])
        baseline, baseline_bytes = cost.naive_grad_seconds, cost.naive_grad_temp_bytes
    candidates, able = [], []
    for name, implementation in load_implementations(composite).items():
        if spec.guarded:
            implementation = _load(GUARDS[composite])(implementation, spec)
        run: Any = implementation if grad is None else implementation.grad
        if target.platform not in implementation.platforms:
            reason = f"runs on {', '.join(implementation.platforms)} only"
        elif run is None:
            reason = "has no backward pass"
        else:
            reason = run.supports(*parts)
        if run is None or reason is not None:
            candidates.append(Candidate(name, False, reason))
            continue
        seconds, temp = run.seconds(*parts), run.temp_bytes(*parts)
        candidates.append(Candidate(name, True, None, seconds, temp))
        able.append((seconds, temp, implementation))
    naive, naive_bytes = baseline(*parts), baseline_bytes(*parts)
    candidates.append(Candidate(BASELINE, True, None, naive, naive_bytes))
    return _decide(able, candidates, naive, naive_bytes, target)


def _decide(able, candidates, baseline, baseline_bytes: int, target: Target) -> Choice:
    if not able:
        return Choice(None, _why_none(candidates), candidates)
    seconds, temp, best = min(able, key=lambda row: row[0])
    saved = max(baseline_bytes - temp, 0)
    times = f"{best.name} {_time(seconds)}, XLA's own code {_time(baseline)}"
    if seconds <= FASTER * baseline:
        return Choice(best, f"predicted faster: {times}", candidates, saved)
    if saved >= MATTERING_BYTES and seconds <= MATTERING_SLOWDOWN * baseline:
        return Choice(best, f"saves {saved >> 20} MiB: {times}", candidates, saved)
    if baseline_bytes > target.spec.memory_bytes // 2:
        return Choice(best, "XLA's own code hardly fits in memory", candidates, saved)
    return Choice(None, f"nothing predicted to be faster: {times}", candidates)


def _why_none(candidates: Sequence[Candidate]) -> str:
    reasons = [f"{c.name}: {c.reason}" for c in candidates if not c.supported]
    return "no implementation can run it (" + "; ".join(reasons) + ")"


def _time(seconds: float) -> str:
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


@dataclass(frozen=True)
class Lowered:
    """A lowered implementation.

    Attributes:
      text: MLIR.
      results: shapes and dtypes of what it returns, flat.
    """

    text: str
    results: tuple[jax.ShapeDtypeStruct, ...]


# The name that JAX gives to the mesh of a function.
_MESH = "mesh"

_lowered: dict[tuple, Lowered] = {}


def lower_function(
    function: Callable, types: Sequence[jax.ShapeDtypeStruct], platform: str, key: Any
) -> Lowered:
    """Lowers a JAX function for a platform; remembered under `key`.

    Args:
      function: takes arrays of `types`.
      types: shapes and dtypes of its arguments.
      platform: "cpu", "cuda" or "tpu".
      key: hashable; equal keys must mean equal programs.  None: do not remember.
    """
    full_key = (key, platform)
    found = None if key is None else _lowered.get(full_key)
    if found is None:
        wide = any(str(t.dtype) in ("float64", "int64", "uint64") for t in types)
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(wide or jax.config.jax_enable_x64))
            # A mesh of the caller is not the program's. Inside a shard_map JAX lets
            # none be left; the stage does that before it gets here.
            with contextlib.suppress(ValueError):
                stack.enter_context(jax.set_mesh(None))
            # keep_unused: the call hands over every operand
            traced = jax.jit(function, keep_unused=True).trace(*types)
            lowered = traced.lower(lowering_platforms=(platform,))
            module = lowered.compiler_ir("stablehlo")
            results = tuple(
                jax.ShapeDtypeStruct(one.shape, one.dtype)
                for one in jax.tree.leaves(lowered.out_info)
            )
            found = Lowered(module.operation.get_asm(enable_debug_info=True), results)
        if key is not None:
            _lowered[full_key] = found
    return found


def splice(
    module: StableHloModule, lowered: Lowered, name: str, mesh_name: str = _MESH
) -> str:
    """Adds the functions of a lowered implementation to a module.

    Args:
      module: changed in place.
      lowered: what to add; its entry function becomes private.
      name: wanted name of the entry function.
      mesh_name: of the module's mesh, if the implementation has that mesh too.

    Returns:
      The name that the entry function got.
    """
    text = lowered.text
    if mesh_name != _MESH:
        text = re.sub(rf"@{_MESH}\b", f'@"{mesh_name}"', text)
    with module.context:
        other = ir.Module.parse(text)
    taken = {*module.functions()}
    renamed: dict[str, str] = {}
    body = list(other.body.operations)
    for op in body:
        old = ir.StringAttr(op.attributes["sym_name"]).value
        if op.operation.name != "func.func":
            continue
        wanted = name if old == "main" else f"{name}.{old}"
        for number in itertools.count():
            new = f"{wanted}_{number}" if number else wanted
            if new not in taken:
                break
        taken.add(new)
        renamed[old] = new
    for op in body:
        if op.operation.name != "func.func":
            _add_symbol(module, op)
            continue
        _rename_references(op.operation, renamed)
        old = ir.StringAttr(op.attributes["sym_name"]).value
        op.attributes["sym_name"] = ir.StringAttr.get(renamed[old], module.context)
        op.attributes["sym_visibility"] = ir.StringAttr.get("private", module.context)
        for attribute in ("arg_attrs", "res_attrs"):
            if attribute in op.attributes:
                del op.attributes[attribute]
        with ir.InsertionPoint(module.module.body):
            op.operation.clone()
    return renamed["main"]


def _add_symbol(module: StableHloModule, op: ir.OpView) -> None:
    """Adds a mesh of the implementation, unless the module has it."""
    name = op.attributes["sym_name"]
    for own in module.module.body.operations:
        if "sym_name" in own.attributes and own.attributes["sym_name"] == name:
            return
    with ir.InsertionPoint.at_block_begin(module.module.body):
        op.operation.clone()


def _rename_references(function: ir.Operation, renamed: dict[str, str]) -> None:
    def visit(op: ir.Operation) -> ir.WalkResult:
        for attribute in ("callee", "decomposition"):
            if attribute in op.attributes:
                old = ir.FlatSymbolRefAttr(op.attributes[attribute]).value
                if old in renamed:
                    op.attributes[attribute] = ir.FlatSymbolRefAttr.get(
                        renamed[old], op.context
                    )
        return ir.WalkResult.ADVANCE

    function.walk(visit)


PLATFORM_NAMES = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
