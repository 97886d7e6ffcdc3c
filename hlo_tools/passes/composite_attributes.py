"""Reads what outlining wrote on a composite."""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir


def name_of(op: ir.Operation) -> str:
    """Returns which composite an operation is."""
    return ir.StringAttr(op.attributes["name"]).value


def callee_of(op: ir.Operation) -> str:
    """Returns the name of the decomposition."""
    return ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value


def recomputes(op: ir.Operation) -> bool:
    """Returns whether a backward pass computes the scores once more."""
    attributes = ir.DictAttr(op.attributes["composite_attributes"])
    found = attributes["recomputes"] if "recomputes" in attributes else None
    return found is not None and ir.BoolAttr(found).value


def site_of(op: ir.Operation) -> str:
    """Returns the id that a composite carries, or ""."""
    attributes = ir.DictAttr(op.attributes["composite_attributes"])
    return ir.StringAttr(attributes["site"]).value if "site" in attributes else ""


def escapes_of(op: ir.Operation) -> dict[str, Any]:
    """Returns where intermediate values are used elsewhere, under "escapes"."""
    attributes = ir.DictAttr(op.attributes["composite_attributes"])
    if "escapes" not in attributes:
        return {}
    escapes = ir.ArrayAttr(attributes["escapes"])
    found: dict[str, Any] = {"escapes": [ir.StringAttr(a).value for a in escapes]}
    if "unproven" in attributes:
        found["unproven"] = ir.StringAttr(attributes["unproven"]).value
    return found
