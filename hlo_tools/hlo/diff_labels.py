"""What an instruction computes, as a label that two modules can be compared by.

Two forms: `exact` has everything but names, numbers, metadata and layouts; `loose` has
no sizes, no element types and no values of constants either, so that the same program
for another batch or in another precision has the same labels.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Hashable

from hlo_tools.hlo import attributes as read
from hlo_tools.hlo.ir import CALLERS, HloComputation, HloInstruction
from hlo_tools.hlo.shapes import Shape

# Attributes that say nothing about what is computed, or are compared on their own.
IGNORED = frozenset(
    (
        "metadata",
        "backend_config",
        "channel_id",
        "control-predecessors",
        "origin",
        "original_value",
        "statistics",
        "sharding",
        "frontend_attributes",
        "operand_layout_constraints",
        *CALLERS,
    )
)
# Attributes with sizes in them.
SIZED = frozenset(("slice", "dynamic_slice_sizes", "slice_sizes", "padding", "window"))
COMMUTATIVE = frozenset(("add", "multiply", "maximum", "minimum", "and", "or", "xor"))
# A flag that is not set may be left out.
_DEFAULTS = {
    ("indices_are_sorted", "false"),
    ("unique_indices", "false"),
    ("is_stable", "false"),
    ("use_global_device_ids", "false"),
    ("feature_group_count", "1"),
    ("batch_group_count", "1"),
}
_BLANKS = re.compile(r"\s+")


@functools.lru_cache(maxsize=1 << 16)
def _exact_shape(shape: Shape) -> str:
    return str(shape.without_layout())


@functools.lru_cache(maxsize=1 << 16)
def _loose_shape(shape: Shape) -> str:
    if shape.elements:
        return f"({', '.join(_loose_shape(part) for part in shape.elements)})"
    return str(shape.rank)


@functools.lru_cache(maxsize=1 << 14)
def attribute_value(key: str, text: str) -> Hashable:
    """An attribute's value in one spelling."""
    if key == "replica_groups":
        groups = read.replica_groups(text)
        return text if groups is None else groups
    return _BLANKS.sub("", text)


def compared_attributes(instruction: HloInstruction) -> dict[str, Hashable]:
    """The attributes that say what is computed, in one spelling."""
    return {
        key: attribute_value(key, text)
        for key, text in sorted(instruction.attributes.items())
        if key not in IGNORED and (key, text) not in _DEFAULTS
    }


def payload(instruction: HloInstruction) -> str:
    """A constant's literal in one spelling; "" for anything else."""
    if instruction.opcode == "parameter":
        return ""
    return _BLANKS.sub("", instruction.payload)


def labels(
    instruction: HloInstruction, called: tuple[Hashable, Hashable] = ((), ())
) -> tuple[Hashable, Hashable]:
    """The exact and the loose label.

    Args:
        instruction: any.
        called: the same two for what it calls.
    """
    attributes = compared_attributes(instruction)
    opcode = instruction.opcode
    exact = (
        opcode,
        _exact_shape(instruction.shape),
        payload(instruction),
        tuple(attributes.items()),
        called[0],
    )
    loose = (
        opcode,
        _loose_shape(instruction.shape),
        tuple(item for item in attributes.items() if item[0] not in SIZED),
        called[1],
    )
    return exact, loose


def digest(value: object) -> str:
    """A short text that is equal for equal values, in every process."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def computation_labels(
    computation: HloComputation, seen: frozenset[str] = frozenset()
) -> tuple[str, str]:
    """The exact and the loose digest of a whole computation, as its root's.

    Args:
        computation: of a reduction, say.
        seen: computations around it, which it can not call.
    """
    if computation.name in seen:
        return "recursive", "recursive"
    seen = seen | {computation.name}
    values: dict[str, tuple[str, str]] = {}
    for instruction in computation:
        inner = called_labels(instruction, seen)
        exact, loose = labels(instruction, inner)
        operands = [
            values.get(name, ("undefined", "undefined"))
            for name in instruction.operand_names
        ]
        both = []
        for which, label in enumerate((exact, loose)):
            parts = [operand[which] for operand in operands]
            if instruction.opcode in COMMUTATIVE:
                parts.sort()
            number = instruction.parameter_number
            both.append(digest((label, number, tuple(parts))))
        values[instruction.name] = (both[0], both[1])
    root = computation.root
    return ("incomplete", "incomplete") if root is None else values[root.name]


def called_labels(
    instruction: HloInstruction, seen: frozenset[str] = frozenset()
) -> tuple[Hashable, Hashable]:
    """Labels of all computations that an instruction calls, together."""
    called = instruction.called
    if not called:
        return (), ()
    both = [computation_labels(c, seen) for c in called]
    return tuple(b[0] for b in both), tuple(b[1] for b in both)
