"""HLO text from the IR; parsing it gives an equal module."""

from hlo_tools.hlo.header import print_tables
from hlo_tools.hlo.ir import HloComputation, HloInstruction, HloModule


def print_module(module: HloModule) -> str:
    """The module as HLO text. Text that was not understood comes last."""
    parts = []
    if module.name:
        head = f"HloModule {module.name}{print_attributes(module.attributes)}\n\n"
        parts.append(head)
    parts.append(print_tables(module.stack))
    parts.append("\n\n".join(map(print_computation, module.computations)))
    parts.extend(f"\n{unparsed.text}" for unparsed in module.unparsed)
    return "".join(parts) + "\n"


def print_computation(computation: HloComputation) -> str:
    """The computation as HLO text, without the closing brace if it was cut."""
    entry = "ENTRY " if computation.is_entry else ""
    signature = f" {computation.signature}" if computation.signature else ""
    lines = [f"{entry}%{computation.name}{signature} {{"]
    lines.extend(f"  {print_instruction(i)}" for i in computation.instructions)
    if computation.is_complete:
        lines.append(f"}}{print_attributes(computation.attributes)}")
    return "\n".join(lines)


def print_instruction(instruction: HloInstruction) -> str:
    """The instruction as one line of HLO text."""
    root = "ROOT " if instruction.is_root else ""
    operands = instruction.payload or ", ".join(
        f"%{name}" for name in instruction.operand_names
    )
    return (
        f"{root}%{instruction.name} = {instruction.shape} {instruction.opcode}"
        f"({operands}){print_attributes(instruction.attributes)}"
    )


def print_attributes(attributes: dict[str, str]) -> str:
    """`, key=value` for each attribute."""
    return "".join(
        f", {key}={value}" if value else f", {key}" for key, value in attributes.items()
    )
