"""What a dot_general multiplies, and which products an exponential reaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax.extend.mlir.dialects import stablehlo

from hlo_tools.matching.outcome import NoMatchError
from hlo_tools.matching.reader import ELEMENTWISE, SHAPE_OPS, dtype_of


@dataclass
class DotDims:
    """Dimension numbers of a dot_general, by side."""

    batch: tuple[tuple[int, ...], tuple[int, ...]]
    contract: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, op) -> DotDims:
        numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        return cls(
            (
                tuple(numbers.lhs_batching_dimensions),
                tuple(numbers.rhs_batching_dimensions),
            ),
            (
                tuple(numbers.lhs_contracting_dimensions),
                tuple(numbers.rhs_contracting_dimensions),
            ),
        )

    def free(self, side: int, rank: int) -> tuple[int, ...]:
        used = {*self.batch[side], *self.contract[side]}
        return tuple(dim for dim in range(rank) if dim not in used)


def has_plain_algorithm(dot) -> bool:
    """Returns whether a dot_general multiplies in its operands' own types.

    jax.nn writes the algorithm BF16_BF16_F32 on bfloat16 products, which is what
    they do anyway; emulations (BF16_X3, TF32, ...) are something else.
    """
    if "algorithm" not in dot.attributes:
        return True
    algorithm = stablehlo.DotAlgorithm(dot.attributes["algorithm"])
    types = [dtype_of(operand) for operand in dot.operands]
    return (
        [str(algorithm.lhs_precision_type), str(algorithm.rhs_precision_type)] == types
        and str(algorithm.accumulation_type) in ("f32", "f64")
        and algorithm.num_primitive_operations == 1
    )


def rounds_at_most(dot) -> bool:
    """Returns whether a dot_general is one product of its operands, rounded or not.

    A gradient's algorithm may round a float32 operand to the type of the other
    (jax.nn's bfloat16 products do); that is a conversion like any other.
    """
    if "algorithm" not in dot.attributes:
        return True
    algorithm = stablehlo.DotAlgorithm(dot.attributes["algorithm"])
    types = [algorithm.lhs_precision_type, algorithm.rhs_precision_type]
    own = [dtype_of(operand) for operand in dot.operands]
    return (
        all(
            str(rounded) in ("bf16", "f16", mine)
            for rounded, mine in zip(types, own, strict=True)
        )
        and str(algorithm.accumulation_type) in ("f32", "f64")
        and algorithm.num_primitive_operations == 1
    )


def value_products(exponential) -> Iterator[tuple[object, int]]:
    """Yields (dot_general, operand number) that an exponential reaches.

    Only elementwise and shape operations are followed.
    """
    seen, stack = set(), [exponential.results[0]]
    while stack and len(seen) < 64:
        value = stack.pop()
        for use in value.uses:
            op = use.owner
            name = op.operation.name
            if name == "stablehlo.dot_general":
                yield op, use.operand_number
            elif name in ELEMENTWISE or name in SHAPE_OPS:
                result = op.operation.results[0]
                if result not in seen:
                    seen.add(result)
                    stack.append(result)


def require_first_product(dot, side: int, exponential) -> None:
    """Rejects a product that the probabilities reach only after another one.

    The backward pass of a softmax over queries contracts the probabilities along
    their softmax axis too, but there they were made for the other product.
    """
    contract = DotDims.of(dot).contract[side]
    for other, number in value_products(exponential):
        if other.operation.block != dot.operation.block or other == dot:
            continue
        earlier = other.operation.is_before_in_block(dot.operation)
        if earlier and DotDims.of(other).contract[number] != contract:
            raise NoMatchError(
                "the probabilities were made for an earlier product",
                value=other.operation.results[0],
            )
