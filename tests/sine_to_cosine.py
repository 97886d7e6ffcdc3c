"""A transform whose effect can be seen: every sine becomes a cosine.

Tests of the stage put it in the place of `hlo_tools.driver.transform`, so that
"the stage fired" is a matter of numbers.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

import hlo_tools
from hlo_tools import driver, stage_compile
from hlo_tools.report import RewriteReport, SiteReport


def transform(module, target, config):
    """As `driver.transform`, for sines; reports one bound site for each."""
    with module.context:
        copy = ir.Module.parse(module.operation.get_asm(binary=True))
    sines = []
    copy.operation.walk(lambda op: collect(op, sines))
    for op in sines:
        with ir.InsertionPoint(op), op.location:
            op.results[0].replace_all_uses_with(stablehlo.cosine(op.operands[0]))
        op.erase()
    report = RewriteReport(stage_compile.module_name(module), target.spec.name)
    report.sites = [
        SiteReport(f"sine.{i}", "sine", status="bound", implementation="cosine")
        for i in range(len(sines))
    ]
    return (copy if sines else module), report


def collect(op, sines):
    if op.name == "stablehlo.sine":
        sines.append(op)
    return ir.WalkResult.ADVANCE


def inject(monkeypatch=None):
    """Use `transform`; until the end of the test where `monkeypatch` is given."""
    if monkeypatch is None:
        driver.transform = transform
    else:
        monkeypatch.setattr(driver, "transform", transform)


staged = functools.partial(hlo_tools.jit, passes="")


@contextlib.contextmanager
def clean_stage(monkeypatch):
    """The visible transform in the body, and nothing of one test in the next."""
    inject(monkeypatch)
    stage_compile._warned.clear()
    jax.clear_caches()
    yield
    hlo_tools.uninstall()
    jax.clear_caches()


def sine():
    """A new function every time, so that no test finds another's traces."""

    def sine(x):
        return jnp.sin(x)

    return sine


def assert_cosine(got, x):
    np.testing.assert_allclose(got, jnp.cos(x), rtol=1e-6)


def assert_sine(got, x):
    np.testing.assert_allclose(got, jnp.sin(x), rtol=1e-6)
