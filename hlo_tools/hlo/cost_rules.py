"""FLOPs of one instruction, by opcode; the conventions are those of XLA's own count.

A multiply-add is two. Transcendental functions are counted apart, an element each.
A reduction applies its function once less than it has elements, for each result. What
only moves data has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from hlo_tools.hlo import attributes as read
from hlo_tools.hlo.attributes import Window
from hlo_tools.hlo.ir import HloComputation, HloInstruction
from hlo_tools.hlo.shapes import Shape

TRANSCENDENTAL = frozenset(
    "exponential exponential-minus-one log log-plus-one logistic power sqrt cbrt rsqrt "
    "tanh sine cosine tan atan2 erf acos acosh asin asinh atanh cosh sinh".split()
)
ELEMENTWISE = frozenset(
    "abs add and ceil clamp clz compare complex convert count-leading-zeros divide "
    "floor imag is-finite maximum minimum multiply negate not or popcnt real "
    "reduce-precision remainder round-nearest-afz round-nearest-even select "
    "shift-left shift-right-arithmetic shift-right-logical sign stochastic-convert "
    "subtract xor mulhi".split()
)


class Work(NamedTuple):
    """Operations of an instruction."""

    flops: float = 0.0
    transcendentals: float = 0.0

    def __add__(self, other: tuple) -> Work:  # type: ignore[override]
        return Work(self[0] + other[0], self[1] + other[1])

    def times(self, count: float) -> Work:
        return Work(self.flops * count, self.transcendentals * count)


OfComputation = Callable[[HloComputation], Work]


def work_of(instruction: HloInstruction, inside: OfComputation) -> Work:
    """Operations of an instruction, those of what it calls included.

    Args:
        instruction: any. A loop is counted for one trip.
        inside: operations of a computation, applied once.
    """
    opcode = instruction.opcode
    if opcode in TRANSCENDENTAL:
        return Work(transcendentals=float(elements(instruction.shape)))
    if opcode in ELEMENTWISE:
        return Work(float(elements(instruction.shape)))
    rule = _RULES.get(opcode)
    return Work() if rule is None else rule(instruction, inside)


def elements(shape: Shape) -> int:
    """Elements of an array, or of all arrays of a tuple."""
    return sum(part.element_count for part in shape.arrays())


def _first(shape: Shape) -> Shape:
    return next(iter(shape.arrays()), shape)


def _ints(instruction: HloInstruction, key: str) -> tuple[int, ...]:
    return read.ints(instruction.attributes.get(key, ""))


def _called(instruction: HloInstruction, key: str) -> HloComputation | None:
    module = instruction.computation.module if instruction.computation else None
    found = read.names(instruction.attributes.get(key, ""))
    if module is None or not found:
        return None
    return module.computations_by_name.get(found[0])


def _applied(instruction: HloInstruction, key: str, inside: OfComputation) -> Work:
    function = _called(instruction, key)
    return Work() if function is None else inside(function)


def _dot(instruction: HloInstruction, inside: OfComputation) -> Work:
    lhs = instruction.operands[0].shape
    width = math.prod(
        lhs.dimensions[d] for d in _ints(instruction, "lhs_contracting_dims")
    )
    return Work(2.0 * elements(instruction.shape) * width)


def _convolution(instruction: HloInstruction, inside: OfComputation) -> Work:
    """Only products with elements that are no padding count."""
    lhs, rhs = (operand.shape for operand in instruction.operands[:2])
    labels = read.dim_labels(instruction.attributes.get("dim_labels", ""))
    if labels is None:
        return Work()
    window = Window.parse(instruction.attributes.get("window", "{}"))
    positions = 1
    for axis, _ in enumerate(window.size):
        name = str(axis)
        sizes = (
            lhs.dimensions[labels[0].index(name)],
            rhs.dimensions[labels[1].index(name)],
            instruction.shape.dimensions[labels[2].index(name)],
        )
        positions *= _valid_positions(window, axis, *sizes)
    features = lhs.dimensions[labels[0].index("f")]
    features //= _count(instruction, "feature_group_count")
    batch = lhs.dimensions[labels[0].index("b")]
    batch //= _count(instruction, "batch_group_count")
    out = instruction.shape.dimensions[labels[2].index("f")]
    return Work(2.0 * features * out * batch * positions)


def _count(instruction: HloInstruction, key: str) -> int:
    return int(instruction.attributes.get(key, "1"))


def _valid_positions(window: Window, axis: int, lhs: int, kernel: int, out: int) -> int:
    """Pairs (kernel element, result) along an axis that meet an input element."""
    stride, base = window.stride[axis], window.lhs_dilate[axis]
    found = 0
    for k in range(kernel):
        start = k * window.rhs_dilate[axis] - window.pad[axis][0]
        # 0 <= start + o * stride <= (lhs - 1) * base, and a multiple of base
        step = base // math.gcd(stride, base)
        low = max(0, -(start // stride))
        high = min(out - 1, ((lhs - 1) * base - start) // stride)
        first = next(
            (o for o in range(low, low + step) if (start + o * stride) % base == 0),
            None,
        )
        if first is not None and first <= high:
            found += (high - first) // step + 1
    return found


def _reduce(instruction: HloInstruction, inside: OfComputation) -> Work:
    arg = instruction.operands[0].shape
    count = elements(arg) - _first(instruction.shape).element_count
    return _applied(instruction, "to_apply", inside).times(count)


def _reduce_window(instruction: HloInstruction, inside: OfComputation) -> Work:
    window = Window.parse(instruction.attributes.get("window", "{}"))
    size, out = math.prod(window.size), _first(instruction.shape)
    count = (size - 1) * out.element_count
    wide = [i for i, width in enumerate(window.size) if width != 1]
    padded = [i for i, pad in enumerate(window.pad) if pad != (0, 0)]
    if len(wide) == len(padded) == 1 and not instruction.shape.is_tuple:
        axis, (low, high) = wide[0], window.pad[wide[0]]
        whole = out.dimensions[axis]
        # a reduction of the whole axis, its result at every place of it
        if low == high == whole - 1 and window.size[axis] == 2 * low + 1:
            count = out.element_count // whole + whole - 1
    return _applied(instruction, "to_apply", inside).times(count)


def _select_and_scatter(instruction: HloInstruction, inside: OfComputation) -> Work:
    window = Window.parse(instruction.attributes.get("window", "{}"))
    source = elements(instruction.operands[1].shape)
    selects = _applied(instruction, "select", inside)
    scatters = _applied(instruction, "scatter", inside)
    return selects.times(source * (math.prod(window.size) - 1)) + scatters.times(source)


def _scatter(instruction: HloInstruction, inside: OfComputation) -> Work:
    updates = instruction.operands[len(instruction.operands) // 2 + 1]
    return _applied(instruction, "to_apply", inside).times(elements(updates.shape))


def _map(instruction: HloInstruction, inside: OfComputation) -> Work:
    return _applied(instruction, "to_apply", inside).times(elements(instruction.shape))


def _called_once(instruction: HloInstruction, inside: OfComputation) -> Work:
    total = Work()
    for computation in instruction.called:
        total += inside(computation)
    return total


def _conditional(instruction: HloInstruction, inside: OfComputation) -> Work:
    """The most that a branch does, of each kind."""
    works = [inside(computation) for computation in instruction.called]
    if not works:
        return Work()
    return Work(max(w[0] for w in works), max(w[1] for w in works))


def _sort(instruction: HloInstruction, inside: OfComputation) -> Work:
    count = elements(instruction.operands[0].shape)
    return Work(float(count * max(count - 1, 0).bit_length()))


def _fft(instruction: HloInstruction, inside: OfComputation) -> Work:
    factors = math.prod(
        max(length.bit_length() - 1, 0) for length in _ints(instruction, "fft_length")
    )
    return Work(8.0 * factors * elements(instruction.operands[0].shape))


def _all_reduce(instruction: HloInstruction, inside: OfComputation) -> Work:
    """Each result is the sum of two, as if there were two devices."""
    return Work(float(elements(instruction.shape)))


def _random(instruction: HloInstruction, inside: OfComputation) -> Work:
    return Work(transcendentals=float(elements(instruction.shape)))


def _triangular_solve(instruction: HloInstruction, inside: OfComputation) -> Work:
    a, b = (operand.shape for operand in instruction.operands[:2])
    return Work(2.0 * a.dimensions[-1] * elements(b))


def _cholesky(instruction: HloInstruction, inside: OfComputation) -> Work:
    a = instruction.operands[0].shape
    return Work(float(a.dimensions[-1] * elements(a) // 3))


_RULES: dict[str, Callable[[HloInstruction, OfComputation], Work]] = {
    "all-reduce": _all_reduce,
    "all-reduce-start": _all_reduce,
    "async-start": _called_once,
    "call": _called_once,
    "cholesky": _cholesky,
    "conditional": _conditional,
    "convolution": _convolution,
    "dot": _dot,
    "fft": _fft,
    "fusion": _called_once,
    "map": _map,
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "rng": _random,
    "rng-bit-generator": _random,
    "scatter": _scatter,
    "select-and-scatter": _select_and_scatter,
    "sort": _sort,
    "triangular-solve": _triangular_solve,
    "while": _called_once,
}
