"""How often the body of a while loop runs, where that can be told."""

from __future__ import annotations

from hlo_tools.hlo import attributes as read
from hlo_tools.hlo.ir import HloComputation, HloInstruction


def trip_count(loop: HloInstruction) -> int | None:
    """Trips of a while instruction: what XLA noted, else what its counter says.

    Returns:
        None where neither tells, as for a loop that runs until something converges.
    """
    config = loop.backend_config
    if isinstance(config, dict):
        noted = config.get("known_trip_count")
        noted = noted.get("n") if isinstance(noted, dict) else None
        if noted is not None and str(noted).isdigit():
            return int(noted)
    return _counted(loop)


def _counted(loop: HloInstruction) -> int | None:
    """For a counter from a constant by a constant step against a constant limit."""
    condition, body = (_computation(loop, k) for k in ("condition", "body"))
    test = condition.root if condition else None
    if body is None or test is None or test.opcode != "compare":
        return None
    index, limit = _element_of(test.operands[0]), _integer(test.operands[1])
    init, after = loop.operands[0], body.root
    if index is None or limit is None or after is None:
        return None
    if init.opcode != "tuple" or after.opcode != "tuple":
        return None
    start, step = _integer(init.operands[index]), _step(after.operands[index], index)
    if start is None or not step:
        return None
    direction = test.attributes.get("direction", "")
    span = limit - start
    if direction == "LE":
        span += 1
    elif direction == "GE":
        span -= 1
    if direction in ("LT", "LE") and step > 0:
        return max(0, -(-span // step))
    if direction in ("GT", "GE") and step < 0:
        return max(0, -(-span // step))
    return None


def _computation(loop: HloInstruction, key: str) -> HloComputation | None:
    module = loop.computation.module if loop.computation else None
    found = read.names(loop.attributes.get(key, ""))
    if module is None or not found:
        return None
    return module.computations_by_name.get(found[0])


def _element_of(value: HloInstruction) -> int | None:
    """The index of a value taken from the loop's state as it is."""
    if value.opcode != "get-tuple-element" or value.operands[0].opcode != "parameter":
        return None
    text = value.attributes.get("index", "")
    return int(text) if text.isdigit() else None


def _integer(value: HloInstruction) -> int | None:
    while value.opcode in ("copy", "bitcast") and value.operands:
        value = value.operands[0]
    text = value.payload.strip()
    if value.opcode == "constant" and text.lstrip("-").isdigit():
        return int(text)
    return None


def _step(value: HloInstruction, index: int) -> int | None:
    if value.opcode != "add" or len(value.operands) != 2:
        return None
    for counter, step in (value.operands, value.operands[::-1]):
        if _element_of(counter) == index:
            return _integer(step)
    return None
