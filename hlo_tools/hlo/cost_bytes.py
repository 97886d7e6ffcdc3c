"""Bytes an instruction reads and writes in main memory; XLA's conventions.

What only renames a value touches nothing. A slice reads what it takes, an update in
place writes what it puts. Inside a fusion only its parameters and results count.
"""

from __future__ import annotations

from hlo_tools.hlo.ir import HloInstruction
from hlo_tools.hlo.shapes import Shape

FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all add-dependency "
    "domain optimization-barrier partition-id replica-id copy-done async-done "
    "async-update all-gather-done all-reduce-done collective-permute-done send-done "
    "recv-done while conditional call".split()
)


def main_bytes(shape: Shape) -> int:
    """Bytes of the arrays that lie in main memory, not in a TPU's vector memory."""
    return sum(
        part.byte_size
        for part in shape.arrays()
        if part.layout is None or part.layout.memory_space == 0
    )


def bytes_of(instruction: HloInstruction) -> int:
    """Bytes accessed by an instruction; 0 for one whose called computations count."""
    opcode, operands = instruction.opcode, instruction.operands
    out = main_bytes(instruction.shape)
    if opcode in FREE:
        return 0
    if opcode == "fusion":
        return _fusion(instruction)
    if opcode == "slice":
        return 2 * out
    if opcode == "dynamic-slice":
        return 2 * out + _sizes(operands[1:])
    if opcode == "dynamic-update-slice":
        return 2 * main_bytes(operands[1].shape) + _sizes(operands[2:])
    if opcode == "gather":
        return 2 * out + _sizes(operands[1:2])
    if opcode == "scatter":
        count = len(operands) // 2
        return 3 * _sizes(operands[count + 1 :]) + main_bytes(operands[count].shape)
    return out + _sizes(operands)


def _sizes(operands: tuple[HloInstruction, ...]) -> int:
    return sum(main_bytes(operand.shape) for operand in operands)


def _fusion(fusion: HloInstruction) -> int:
    if not fusion.called or (root := fusion.called[0].root) is None:
        return main_bytes(fusion.shape) + _sizes(fusion.operands)
    roots = root.operands if root.opcode == "tuple" else (root,)
    written = sum(
        main_bytes((r.operands[1] if r.opcode == "dynamic-update-slice" else r).shape)
        for r in roots
    )
    return written + sum(read_of(p) for p in fusion.called[0].parameters)


def read_of(value: HloInstruction) -> int:
    """Bytes of a fusion's parameter that are read; other users share one read."""
    total, whole = 0, False
    for user in value.users:
        if user.opcode == "fusion" and user.called:
            inner = user.called[0].parameters
            total += sum(
                read_of(inner[i]) for i, o in enumerate(user.operands) if o is value
            )
        elif user.opcode == "get-tuple-element":
            total += read_of(user)
        elif user.opcode in ("slice", "dynamic-slice", "gather") and (
            user.operands[0] is value
        ):
            total += main_bytes(user.shape)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] is value:
            pass  # written in place
        elif not whole:
            whole = True
            total += main_bytes(value.shape)
    return total
