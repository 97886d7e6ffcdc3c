"""The normalize passes: golden fragments, what they must not touch, and equal bits."""
# ruff: noqa: E501 (MLIR has long lines)

import itertools
import json
import re
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.extend import backend
from jax.extend.mlir import ir
from random_programs import RandomProgram

from hlo_tools.module import StableHloModule
from hlo_tools.passes.fold_converts import is_lossless
from hlo_tools.pipeline import PassContext, PassPipeline
from hlo_tools.report import RewriteReport
from hlo_tools.rewriting import numpy_dtype
from hlo_tools.targets import Target

BITWISE = (
    "collapse-shapes", "fold-transposes", "canonicalize-masks", "fold-converts",
    "fold-scales", "cse", "dce",
)  # fmt: skip
ALL = ",".join(("inline-calls", *BITWISE))


def program(arguments: str, body: str) -> str:
    """Returns a module; the results' types are read off the return."""
    kinds = body.rpartition(" : ")[2].strip()
    header = f"func.func public @main({arguments}) -> ({kinds})"
    return f"module {{\n  {header} {{\n{body}\n  }}\n}}\n"


def normalize(text: str, passes: str, exactness: str = "reassociating") -> str:
    module = StableHloModule.parse(text)
    context = PassContext(Target.parse("cpu"), RewriteReport(), exactness)
    for one in PassPipeline.parse(passes).passes:  # each, whatever its class says
        before = module.as_text()
        changed = one.run(module, context)
        assert changed or module.as_text() == before, "said that it changed nothing"
    module.verify()
    return module.as_text()


def run(text: str, inputs) -> list[np.ndarray]:
    client = backend.get_backend("cpu")
    loaded = client.compile_and_load(text, client.local_devices()[:1])
    arrays = [jax.numpy.asarray(x) for x in inputs]
    results = loaded.execute_sharded(arrays).disassemble_into_single_device_arrays()
    return [np.asarray(shards[0]) for shards in results]


@dataclass(frozen=True)
class Golden:
    """What a pass makes of a program.

    Attributes:
      name, passes, arguments, body: the test, the passes and the program.
      has: texts that must be in the result; None: it must be as it was.
      lacks: texts that must not be in the body of the result.
      exactness: what is allowed.
    """

    name: str
    passes: str
    arguments: str
    body: str
    has: tuple[str, ...] | None = ()
    lacks: tuple[str, ...] = ()
    exactness: str = "bitwise"


BSHD = "%q: tensor<2x3x4x5xf32>, %k: tensor<2x6x4x5xf32>"
M44 = "%p: tensor<4x4xi1>, %q: tensor<4x4xi1>, %x: tensor<4x4xf32>, %y: tensor<4x4xf32>"
F4 = "%x: tensor<4xf32>, %y: tensor<4xf32>"

TRANSPOSES = [
    Golden(
        "compose", "fold-transposes", "%x: tensor<2x3x4xf32>",
        """%0 = stablehlo.transpose %x, dims = [1, 0, 2] : (tensor<2x3x4xf32>) -> tensor<3x2x4xf32>
        %1 = stablehlo.transpose %0, dims = [0, 2, 1] : (tensor<3x2x4xf32>) -> tensor<3x4x2xf32>
        return %1 : tensor<3x4x2xf32>""",
        ("transpose %arg0, dims = [1, 2, 0]",),
    ),
    Golden(
        "cancel_through_elementwise", "fold-transposes", "%x: tensor<2x3xf32>, %b: tensor<3xf32>",
        """%0 = stablehlo.transpose %x, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
        %1 = stablehlo.broadcast_in_dim %b, dims = [0] : (tensor<3xf32>) -> tensor<3x2xf32>
        %c = stablehlo.constant dense<2.0> : tensor<3x2xf32>
        %2 = stablehlo.add %0, %1 : tensor<3x2xf32>
        %3 = stablehlo.multiply %2, %c : tensor<3x2xf32>
        %4 = stablehlo.transpose %3, dims = [1, 0] : (tensor<3x2xf32>) -> tensor<2x3xf32>
        return %4 : tensor<2x3xf32>""",
        ("broadcast_in_dim %arg1, dims = [1]", "add %arg0"), ("transpose",),
    ),
    Golden(
        "sink_two", "fold-transposes", "%x: tensor<2x3xf32>, %y: tensor<2x3xf32>",
        """%0 = stablehlo.transpose %x, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
        %1 = stablehlo.transpose %y, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
        %2 = stablehlo.compare LT, %0, %1, FLOAT : (tensor<3x2xf32>, tensor<3x2xf32>) -> tensor<3x2xi1>
        return %2 : tensor<3x2xi1>""",
        ("compare LT, %arg0, %arg1,", "transpose %0, dims = [1, 0] : (tensor<2x3xi1>)"),
    ),
    Golden(
        "dot_batch", "fold-transposes", BSHD,
        """%0 = stablehlo.transpose %q, dims = [0, 2, 1, 3] : (tensor<2x3x4x5xf32>) -> tensor<2x4x3x5xf32>
        %1 = stablehlo.transpose %k, dims = [0, 2, 3, 1] : (tensor<2x6x4x5xf32>) -> tensor<2x4x5x6xf32>
        %2 = stablehlo.dot_general %0, %1, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [2], precision = [HIGHEST, DEFAULT] : (tensor<2x4x3x5xf32>, tensor<2x4x5x6xf32>) -> tensor<2x4x3x6xf32>
        return %2 : tensor<2x4x3x6xf32>""",
        ("dot_general %arg0, %arg1, batching_dims = [0, 2] x [0, 2], contracting_dims = [3] x [3], precision = [HIGHEST, DEFAULT]",),
        ("transpose",),
    ),
    Golden(
        "dot_reorders_result", "fold-transposes", "%x: tensor<2x3x4xf32>, %y: tensor<4x5x6xf32>",
        """%0 = stablehlo.transpose %x, dims = [1, 0, 2] : (tensor<2x3x4xf32>) -> tensor<3x2x4xf32>
        %1 = stablehlo.transpose %y, dims = [0, 2, 1] : (tensor<4x5x6xf32>) -> tensor<4x6x5xf32>
        %2 = stablehlo.dot_general %0, %1, contracting_dims = [2] x [0] : (tensor<3x2x4xf32>, tensor<4x6x5xf32>) -> tensor<3x2x6x5xf32>
        return %2 : tensor<3x2x6x5xf32>""",
        ("dot_general %arg0, %arg1", "dims = [1, 0, 3, 2] : (tensor<2x3x5x6xf32>)"),
    ),
    Golden(
        "dot_reorder_saves_nothing", "fold-transposes", "%x: tensor<2x3x4xf32>, %y: tensor<4x5xf32>",
        """%0 = stablehlo.transpose %x, dims = [1, 0, 2] : (tensor<2x3x4xf32>) -> tensor<3x2x4xf32>
        %2 = stablehlo.dot_general %0, %y, contracting_dims = [2] x [0] : (tensor<3x2x4xf32>, tensor<4x5xf32>) -> tensor<3x2x5xf32>
        return %2 : tensor<3x2x5xf32>""",
        None,
    ),
    Golden(
        "dot_through_elementwise", "fold-transposes", "%x: tensor<3x2xbf16>, %y: tensor<3x5xf32>",
        """%0 = stablehlo.transpose %x, dims = [1, 0] : (tensor<3x2xbf16>) -> tensor<2x3xbf16>
        %1 = stablehlo.convert %0 : (tensor<2x3xbf16>) -> tensor<2x3xf32>
        %2 = stablehlo.dot_general %1, %y, contracting_dims = [1] x [0] : (tensor<2x3xf32>, tensor<3x5xf32>) -> tensor<2x5xf32>
        return %2 : tensor<2x5xf32>""",
        ("convert %arg0", "contracting_dims = [0] x [0]"), ("transpose",),
    ),
    Golden(
        "dot_batch_order", "fold-transposes", "%x: tensor<2x3x4xf32>, %y: tensor<2x3x4xf32>",
        """%0 = stablehlo.dot_general %x, %y, batching_dims = [0, 1] x [0, 1], contracting_dims = [2] x [2] : (tensor<2x3x4xf32>, tensor<2x3x4xf32>) -> tensor<2x3xf32>
        %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
        return %1 : tensor<3x2xf32>""",
        ("batching_dims = [1, 0] x [1, 0]",), ("transpose",),
    ),
    Golden(
        "rotary_halves", "fold-transposes", "%x: tensor<2x3x4xf32>",
        """%0 = stablehlo.slice %x [0:2, 0:3, 2:4] : (tensor<2x3x4xf32>) -> tensor<2x3x2xf32>
        %1 = stablehlo.slice %x [0:2, 0:3, 0:2] : (tensor<2x3x4xf32>) -> tensor<2x3x2xf32>
        %2 = stablehlo.transpose %0, dims = [1, 0, 2] : (tensor<2x3x2xf32>) -> tensor<3x2x2xf32>
        %3 = stablehlo.transpose %1, dims = [1, 0, 2] : (tensor<2x3x2xf32>) -> tensor<3x2x2xf32>
        %4 = stablehlo.negate %2 : tensor<3x2x2xf32>
        %5 = stablehlo.concatenate %4, %3, dim = 2 : (tensor<3x2x2xf32>, tensor<3x2x2xf32>) -> tensor<3x2x4xf32>
        %6 = stablehlo.transpose %5, dims = [1, 0, 2] : (tensor<3x2x4xf32>) -> tensor<2x3x4xf32>
        return %6 : tensor<2x3x4xf32>""",
        ("concatenate",), ("transpose",),
    ),
    Golden(
        "sources", "fold-transposes", "%x: tensor<3xf32>",
        """%0 = stablehlo.iota dim = 0 : tensor<2x3xi32>
        %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<2x3xi32>) -> tensor<3x2xi32>
        %c = stablehlo.constant dense<7> : tensor<2x3xi8>
        %2 = stablehlo.transpose %c, dims = [1, 0] : (tensor<2x3xi8>) -> tensor<3x2xi8>
        %3 = stablehlo.broadcast_in_dim %x, dims = [1] : (tensor<3xf32>) -> tensor<2x3xf32>
        %4 = stablehlo.transpose %3, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
        return %1, %2, %4 : tensor<3x2xi32>, tensor<3x2xi8>, tensor<3x2xf32>""",
        ("iota dim = 1 : tensor<3x2xi32>", "dense<7> : tensor<3x2xi8>", "%arg0, dims = [0]"),
        ("transpose",),
    ),
    Golden(
        "annotated", "fold-transposes", "%x: tensor<2x3xf32>",
        """%0 = stablehlo.transpose %x, dims = [1, 0] {mhlo.sharding = "{replicated}"} : (tensor<2x3xf32>) -> tensor<3x2xf32>
        %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<3x2xf32>) -> tensor<2x3xf32>
        return %1 : tensor<2x3xf32>""",
        None,
    ),
    Golden(
        "shared_operand", "fold-transposes", "%x: tensor<2x2xf32>",
        """%0 = stablehlo.transpose %x, dims = [1, 0] : (tensor<2x2xf32>) -> tensor<2x2xf32>
        %1 = stablehlo.dot_general %0, %0, contracting_dims = [0] x [0] : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>
        return %1 : tensor<2x2xf32>""",
        None,
    ),
]  # fmt: skip

SHAPES = [
    Golden(
        "reshape_chain", "collapse-shapes", "%x: tensor<2x3xf32>",
        """%0 = stablehlo.reshape %x : (tensor<2x3xf32>) -> tensor<6xf32>
        %1 = stablehlo.reshape %0 : (tensor<6xf32>) -> tensor<3x2xf32>
        return %1 : tensor<3x2xf32>""",
        ("reshape %arg0 : (tensor<2x3xf32>) -> tensor<3x2xf32>",), ("tensor<6xf32>",),
    ),
    Golden(
        "there_and_back", "collapse-shapes", "%x: tensor<2x3xf32>",
        """%0 = stablehlo.reshape %x : (tensor<2x3xf32>) -> tensor<6xf32>
        %1 = stablehlo.reshape %0 : (tensor<6xf32>) -> tensor<2x3xf32>
        return %1 : tensor<2x3xf32>""",
        ("return %arg0",), ("reshape",),
    ),
    Golden(
        "broadcast_chain", "collapse-shapes", "%x: tensor<3xf32>",
        """%0 = stablehlo.broadcast_in_dim %x, dims = [1] : (tensor<3xf32>) -> tensor<1x3xf32>
        %1 = stablehlo.broadcast_in_dim %0, dims = [1, 2] : (tensor<1x3xf32>) -> tensor<2x1x3xf32>
        %2 = stablehlo.broadcast_in_dim %1, dims = [0, 1, 2] : (tensor<2x1x3xf32>) -> tensor<2x4x3xf32>
        return %2 : tensor<2x4x3xf32>""",
        ("broadcast_in_dim %arg0, dims = [2] : (tensor<3xf32>) -> tensor<2x4x3xf32>",), ("1x3xf32",),
    ),
    Golden(
        "reshape_then_broadcast", "collapse-shapes", "%x: tensor<2x1x3xf32>",
        """%0 = stablehlo.reshape %x : (tensor<2x1x3xf32>) -> tensor<2x3xf32>
        %1 = stablehlo.broadcast_in_dim %0, dims = [0, 2] : (tensor<2x3xf32>) -> tensor<2x4x3xf32>
        return %1 : tensor<2x4x3xf32>""",
        ("broadcast_in_dim %arg0, dims = [0, 1, 2]",), ("reshape",),
    ),
    Golden(
        "broadcast_then_reshape", "collapse-shapes", "%x: tensor<2x1xf32>",
        """%0 = stablehlo.broadcast_in_dim %x, dims = [0, 2] : (tensor<2x1xf32>) -> tensor<2x1x3xf32>
        %1 = stablehlo.reshape %0 : (tensor<2x1x3xf32>) -> tensor<2x3xf32>
        return %1 : tensor<2x3xf32>""",
        ("broadcast_in_dim %arg0, dims = [0, 1]",), ("reshape",),
    ),
    Golden(
        "repeat_stays", "collapse-shapes", "%x: tensor<2x3xf32>",
        """%0 = stablehlo.broadcast_in_dim %x, dims = [0, 2] : (tensor<2x3xf32>) -> tensor<2x4x3xf32>
        %1 = stablehlo.reshape %0 : (tensor<2x4x3xf32>) -> tensor<8x3xf32>
        return %1 : tensor<8x3xf32>""",
        None,
    ),
    Golden(
        "no_room", "collapse-shapes", "%x: tensor<1x3x1xf32>",
        """%0 = stablehlo.reshape %x : (tensor<1x3x1xf32>) -> tensor<3xf32>
        %1 = stablehlo.broadcast_in_dim %0, dims = [0] : (tensor<3xf32>) -> tensor<3x4xf32>
        return %1 : tensor<3x4xf32>""",
        None,
    ),
    Golden(
        "no_room_after", "collapse-shapes", "%x: tensor<3x1xf32>",
        """%0 = stablehlo.reshape %x : (tensor<3x1xf32>) -> tensor<3xf32>
        %1 = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<3xf32>) -> tensor<4x3xf32>
        return %1 : tensor<4x3xf32>""",
        None,
    ),
    Golden(
        "splat_and_iota", "collapse-shapes", "%x: tensor<f32>",
        """%c = stablehlo.constant dense<-0.0> : tensor<bf16>
        %0 = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<bf16>) -> tensor<0x3xbf16>
        %1 = stablehlo.iota dim = 0 : tensor<3xi8>
        %2 = stablehlo.reshape %1 : (tensor<3xi8>) -> tensor<3x1xi8>
        %3 = stablehlo.broadcast_in_dim %2, dims = [0, 1] : (tensor<3x1xi8>) -> tensor<3x4xi8>
        return %0, %3 : tensor<0x3xbf16>, tensor<3x4xi8>""",
        ("dense<-0.000000e+00> : tensor<0x3xbf16>", "iota dim = 0 : tensor<3x4xi8>"), ("broadcast", "reshape"),
    ),
    Golden(
        "one_position_is_no_iota", "collapse-shapes", "%x: tensor<f32>",
        """%1 = stablehlo.iota dim = 0 : tensor<1xi8>
        %3 = stablehlo.broadcast_in_dim %1, dims = [0] : (tensor<1xi8>) -> tensor<4xi8>
        return %3 : tensor<4xi8>""",
        None,
    ),
    Golden(
        "dynamic", "collapse-shapes,fold-transposes,canonicalize-masks,fold-converts,fold-scales", "%x: tensor<?x3xf32>",
        """%2 = stablehlo.transpose %x, dims = [1, 0] : (tensor<?x3xf32>) -> tensor<3x?xf32>
        %3 = stablehlo.transpose %2, dims = [0, 1] : (tensor<3x?xf32>) -> tensor<3x?xf32>
        %4 = stablehlo.convert %3 : (tensor<3x?xf32>) -> tensor<3x?xf64>
        %5 = stablehlo.convert %4 : (tensor<3x?xf64>) -> tensor<3x?xf32>
        return %5 : tensor<3x?xf32>""",
        None,
    ),
]  # fmt: skip

MASKS = [
    Golden(
        "causal_from_tril", "canonicalize-masks", "%x: tensor<f32>",
        """%0 = stablehlo.iota dim = 0 : tensor<4x6xi32>
        %c = stablehlo.constant dense<-1> : tensor<4x6xi32>
        %1 = stablehlo.add %0, %c : tensor<4x6xi32>
        %2 = stablehlo.iota dim = 1 : tensor<4x6xi32>
        %3 = stablehlo.compare LE, %2, %1, SIGNED : (tensor<4x6xi32>, tensor<4x6xi32>) -> tensor<4x6xi1>
        return %3 : tensor<4x6xi1>""",
        ("compare GT, %0, %1,", "iota dim = 0", "iota dim = 1"), ("add",),
    ),
    Golden(
        "window_from_difference", "canonicalize-masks", "%x: tensor<f32>",
        """%0 = stablehlo.iota dim = 0 : tensor<4x6xi32>
        %1 = stablehlo.iota dim = 1 : tensor<4x6xi32>
        %2 = stablehlo.subtract %0, %1 : tensor<4x6xi32>
        %c = stablehlo.constant dense<3> : tensor<4x6xi32>
        %3 = stablehlo.compare LT, %2, %c, SIGNED : (tensor<4x6xi32>, tensor<4x6xi32>) -> tensor<4x6xi1>
        return %3 : tensor<4x6xi1>""",
        ("add %1, %c", "dense<2>", "compare LE, %0, %2"),
    ),
    Golden(
        "one_dimensional_positions", "canonicalize-masks", "%x: tensor<f32>",
        """%0 = stablehlo.iota dim = 0 : tensor<4xi64>
        %c = stablehlo.constant dense<2> : tensor<4xi64>
        %1 = stablehlo.add %c, %0 : tensor<4xi64>
        %2 = stablehlo.convert %1 : (tensor<4xi64>) -> tensor<4xi32>
        %3 = stablehlo.broadcast_in_dim %2, dims = [0] : (tensor<4xi32>) -> tensor<4x6xi32>
        %4 = stablehlo.iota dim = 1 : tensor<4x6xi32>
        %5 = stablehlo.compare GE, %3, %4, SIGNED : (tensor<4x6xi32>, tensor<4x6xi32>) -> tensor<4x6xi1>
        return %5 : tensor<4x6xi1>""",
        ("dense<-2> : tensor<4x6xi32>", "compare GE, %0, %2"),
    ),
    Golden(
        "overflow_is_possible", "canonicalize-masks", "%x: tensor<f32>",
        """%0 = stablehlo.iota dim = 0 : tensor<4x6xi8>
        %c = stablehlo.constant dense<125> : tensor<4x6xi8>
        %1 = stablehlo.add %0, %c : tensor<4x6xi8>
        %2 = stablehlo.iota dim = 1 : tensor<4x6xi8>
        %3 = stablehlo.compare GT, %1, %2, SIGNED : (tensor<4x6xi8>, tensor<4x6xi8>) -> tensor<4x6xi1>
        return %3 : tensor<4x6xi1>""",
        None,
    ),
    Golden(
        "unsigned_stays_positive", "canonicalize-masks", "%x: tensor<f32>",
        """%0 = stablehlo.iota dim = 0 : tensor<4x6xui8>
        %c = stablehlo.constant dense<2> : tensor<4x6xui8>
        %1 = stablehlo.add %0, %c : tensor<4x6xui8>
        %2 = stablehlo.iota dim = 1 : tensor<4x6xui8>
        %3 = stablehlo.compare GT, %1, %2, UNSIGNED : (tensor<4x6xui8>, tensor<4x6xui8>) -> tensor<4x6xi1>
        return %3 : tensor<4x6xi1>""",
        None,
    ),
    Golden(
        "known_from_range", "canonicalize-masks", "%x: tensor<4xf32>",
        """%0 = stablehlo.iota dim = 0 : tensor<4xi32>
        %c = stablehlo.constant dense<0> : tensor<4xi32>
        %3 = stablehlo.compare LT, %0, %c, SIGNED : (tensor<4xi32>, tensor<4xi32>) -> tensor<4xi1>
        return %3 : tensor<4xi1>""",
        ("dense<false>",), ("compare",),
    ),
    Golden(
        "float_compare_is_not_inverted", "canonicalize-masks", F4,
        """%0 = stablehlo.compare LT, %x, %y, FLOAT : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xi1>
        %1 = stablehlo.not %0 : tensor<4xi1>
        return %1 : tensor<4xi1>""",
        None,
    ),
    Golden(
        "integer_compare_is_inverted", "canonicalize-masks", "%x: tensor<4xui8>, %y: tensor<4xui8>",
        """%0 = stablehlo.compare LT, %x, %y, UNSIGNED : (tensor<4xui8>, tensor<4xui8>) -> tensor<4xi1>
        %1 = stablehlo.not %0 : tensor<4xi1>
        return %1 : tensor<4xi1>""",
        ("compare GE, %arg0, %arg1, UNSIGNED",), ("not",),
    ),
    Golden(
        "constant_to_the_right", "canonicalize-masks", F4,
        """%c = stablehlo.constant dense<0.0> : tensor<4xf32>
        %1 = stablehlo.compare LT, %c, %x, FLOAT : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xi1>
        return %1 : tensor<4xi1>""",
        ("compare GT, %arg0, %cst",),
    ),
    Golden(
        "mask_as_number", "canonicalize-masks", M44,
        """%0 = stablehlo.convert %p : (tensor<4x4xi1>) -> tensor<4x4xi32>
        %c = stablehlo.constant dense<0> : tensor<4x4xi32>
        %1 = stablehlo.compare NE, %0, %c, SIGNED : (tensor<4x4xi32>, tensor<4x4xi32>) -> tensor<4x4xi1>
        %f = stablehlo.constant dense<false> : tensor<4x4xi1>
        %2 = stablehlo.compare EQ, %1, %f, UNSIGNED : (tensor<4x4xi1>, tensor<4x4xi1>) -> tensor<4x4xi1>
        %3 = stablehlo.select %2, %x, %y : tensor<4x4xi1>, tensor<4x4xf32>
        return %3 : tensor<4x4xf32>""",
        ("select %arg0, %arg3, %arg2",), ("compare", "convert", "not"),
    ),
    Golden(
        "additive_mask", "canonicalize-masks", M44,
        """%0 = stablehlo.convert %p : (tensor<4x4xi1>) -> tensor<4x4xf32>
        %c = stablehlo.constant dense<1.0> : tensor<4x4xf32>
        %1 = stablehlo.subtract %c, %0 : tensor<4x4xf32>
        %d = stablehlo.constant dense<-1.0e9> : tensor<4x4xf32>
        %2 = stablehlo.multiply %1, %d : tensor<4x4xf32>
        return %2 : tensor<4x4xf32>""",
        ("dense<-0.000000e+00>", "select %arg0"), ("convert", "subtract", "multiply"),
    ),
    Golden(
        "additive_mask_with_infinity", "canonicalize-masks", M44,
        """%0 = stablehlo.convert %p : (tensor<4x4xi1>) -> tensor<4x4xf32>
        %d = stablehlo.constant dense<0xFF800000> : tensor<4x4xf32>
        %2 = stablehlo.multiply %0, %d : tensor<4x4xf32>
        return %2 : tensor<4x4xf32>""",
        None,
    ),
    Golden(
        "zero_of_the_other_sign", "canonicalize-masks", M44,
        """%0 = stablehlo.convert %p : (tensor<4x4xi1>) -> tensor<4x4xf32>
        %d = stablehlo.constant dense<-2.0> : tensor<4x4xf32>
        %2 = stablehlo.multiply %0, %d : tensor<4x4xf32>
        return %2 : tensor<4x4xf32>""",
        None,
    ),
    Golden(
        "nested_selects", "canonicalize-masks", M44,
        """%c = stablehlo.constant dense<-1.0e9> : tensor<4x4xf32>
        %0 = stablehlo.select %q, %x, %c : tensor<4x4xi1>, tensor<4x4xf32>
        %1 = stablehlo.select %p, %0, %c : tensor<4x4xi1>, tensor<4x4xf32>
        %2 = stablehlo.select %q, %x, %y : tensor<4x4xi1>, tensor<4x4xf32>
        %3 = stablehlo.select %q, %y, %2 : tensor<4x4xi1>, tensor<4x4xf32>
        return %1, %3 : tensor<4x4xf32>, tensor<4x4xf32>""",
        ("and %arg0, %arg1", "return"),
    ),
    Golden(
        "logic", "canonicalize-masks", M44,
        """%t = stablehlo.constant dense<true> : tensor<4x4xi1>
        %f = stablehlo.constant dense<false> : tensor<4x4xi1>
        %0 = stablehlo.and %p, %t : tensor<4x4xi1>
        %1 = stablehlo.or %f, %0 : tensor<4x4xi1>
        %2 = stablehlo.xor %1, %f : tensor<4x4xi1>
        %3 = stablehlo.select %2, %t, %f : tensor<4x4xi1>, tensor<4x4xi1>
        %4 = stablehlo.not %3 : tensor<4x4xi1>
        %5 = stablehlo.not %4 : tensor<4x4xi1>
        %6 = stablehlo.select %5, %q, %f : tensor<4x4xi1>, tensor<4x4xi1>
        return %6 : tensor<4x4xi1>""",
        ("and %arg0, %arg1",), ("stablehlo.or", "select", "not"),
    ),
]  # fmt: skip


def chain(kind: str, *steps: str) -> str:
    """Returns a body that scales %x in steps such as "multiply 2.0"."""
    lines, value = [], "%x"
    for i, step in enumerate(steps):
        what, number = step.split()
        lines.append(f"%c{i} = stablehlo.constant dense<{number}> : {kind}")
        lines.append(f"%{i} = stablehlo.{what} {value}, %c{i} : {kind}")
        value = f"%{i}"
    return "\n".join([*lines, f"return {value} : {kind}"])


def scale(name, steps, has, lacks=(), exactness="bitwise", kind="tensor<4xf32>"):
    body = chain(kind, *steps)
    return Golden(name, "fold-scales", f"%x: {kind}", body, has, lacks, exactness)


DOT = """%c = stablehlo.constant dense<0.125> : tensor<2x3xf32>
%0 = stablehlo.multiply %x, %c : tensor<2x3xf32>
%1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
%2 = stablehlo.dot_general %1, %y, contracting_dims = [0] x [0] : (tensor<3x2xf32>, tensor<3x5xf32>) -> tensor<2x5xf32>
%d = stablehlo.constant dense<3.0> : tensor<2x5xf32>
%3 = stablehlo.multiply %2, %d : tensor<2x5xf32>
return %3 : tensor<2x5xf32>"""
DOT_ARGUMENTS = "%x: tensor<2x3xf32>, %y: tensor<3x5xf32>"

SCALES = [
    scale("up_twice", ("multiply 2.0", "multiply -4.0"), ("dense<-8.",)),
    scale("down_twice", ("multiply 0.5", "multiply 0.5"), None),
    scale("up_down", ("multiply 2.0", "multiply 0.5"), None),
    scale("inexact", ("multiply 3.0", "multiply 5.0"), None),
    scale("overflow", ("multiply 0x7E800000", "multiply 16.0"), None),
    scale("reciprocal", ("divide 8.0",), ("dense<1.250000e-01>",), ("divide",)),
    scale("subnormal_reciprocal", ("divide 0x7F000000",), None),
    scale("inexact_reciprocal", ("divide 3.0",), None),
    scale("by_zero", ("divide 0.0",), None, exactness="reassociating"),
    scale("by_one", ("multiply 1.0", "divide 1.0"), ("return %arg0",), ("multiply",)),
    scale("integers", ("multiply 2", "multiply 3"), None, (), "reassociating", "tensor<4xi32>"),
    scale("reassociating", ("multiply 3.0", "divide 6.0"), ("dense<5.000000e-01>",), ("divide",), "reassociating"),
    Golden("through_dot", "fold-scales", DOT_ARGUMENTS, DOT, ("dense<3.750000e-01> : tensor<2x5xf32>", "transpose %arg0"), (), "reassociating"),
    Golden("dot_needs_leave", "fold-scales", DOT_ARGUMENTS, DOT, None),
    Golden("dot_option", "fold-scales{through-dots=false}", DOT_ARGUMENTS, DOT, None, (), "reassociating"),
]  # fmt: skip


def converts(name, kinds, has, lacks=()):
    lines = [
        f"%{i + 1} = stablehlo.convert %{i} : (tensor<4x{a}>) -> tensor<4x{b}>"
        for i, (a, b) in enumerate(itertools.pairwise(kinds))
    ]
    body = "\n".join([*lines, f"return %{len(lines)} : tensor<4x{kinds[-1]}>"])
    body = re.sub(r"%0\b", "%x", body)
    return Golden(name, "fold-converts", f"%x: tensor<4x{kinds[0]}>", body, has, lacks)


GONE = (("return %arg0",), ("convert",))
CONVERTS = [
    converts("bf16", ("bf16", "f32", "bf16"), *GONE),
    converts("f32", ("f32", "bf16", "f32"), None),
    converts("f16_bf16", ("f16", "bf16", "f16"), None),
    converts("i8", ("i8", "i32", "i8"), *GONE),
    converts("i1", ("i1", "f32", "i1"), *GONE),
    converts("i1_as_float", ("i1", "i32", "f32"), None),
    converts("ui8_i8", ("ui8", "i8", "ui8"), None),
    converts("i8_bf16", ("i8", "bf16", "i8"), *GONE),
    converts("i16_bf16", ("i16", "bf16", "i16"), None),
    converts("f32_i32", ("f32", "i32", "f32"), None),
    converts("same", ("f32", "f32"), *GONE),
    converts("widen", ("bf16", "f32", "f64"), ("(tensor<4xbf16>) -> tensor<4xf64>",), ("xf32>",)),
    converts("truncate", ("i32", "i64", "i8"), ("(tensor<4xi32>) -> tensor<4xi8>",), ("xi64",)),
    converts("lossy_end", ("f32", "f64", "bf16"), None),
    converts("complex", ("complex<f32>", "complex<f64>", "complex<f32>"), None),
    Golden(
        "constant", "fold-converts", "%x: tensor<f32>",
        """%c = stablehlo.constant dense<3> : tensor<4xi32>
        %0 = stablehlo.convert %c : (tensor<4xi32>) -> tensor<4xbf16>
        %d = stablehlo.constant dense<257> : tensor<4xi32>
        %1 = stablehlo.convert %d : (tensor<4xi32>) -> tensor<4xbf16>
        return %0, %1 : tensor<4xbf16>, tensor<4xbf16>""",
        ("dense<3.000000e+00> : tensor<4xbf16>", "convert %c :"),
    ),
]  # fmt: skip

GOLDEN = [*TRANSPOSES, *SHAPES, *MASKS, *SCALES, *CONVERTS]
IDS = [f"{case.passes.partition('{')[0]}-{case.name}" for case in GOLDEN]


def body_of(text: str) -> str:
    return text.partition("{\n  func.func")[2]


@pytest.mark.parametrize("case", GOLDEN, ids=IDS)
def test_golden(case: Golden) -> None:
    text = program(case.arguments, case.body)
    after = normalize(text, case.passes, case.exactness)
    if case.has is None:
        assert after == StableHloModule.parse(text).as_text()
        return
    for fragment in case.has:
        assert fragment in after
    for fragment in case.lacks:
        assert fragment not in body_of(after)
    assert normalize(after, case.passes, case.exactness) == after, "not idempotent"


SPECIAL = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -2.0, 0.5, 3.0, -1e30, 1e-40]


def special_inputs(text: str) -> list[np.ndarray]:
    """Returns inputs with the corner cases of each type."""
    rng = np.random.default_rng(0)
    arrays = []
    module = StableHloModule.parse(text)
    for argument in module.main.regions[0].blocks[0].arguments:
        shape, kind = tuple(argument.type.shape), str(argument.type.element_type)
        if kind == "i1":
            arrays.append(rng.random(shape) < 0.5)
        elif kind.startswith(("i", "ui")):
            dtype = np.dtype(kind.replace("i", "int", 1))
            limits = np.iinfo(dtype)
            values = [0, 1, 2, 127, limits.min, limits.max]
            arrays.append(rng.choice(np.array(values, dtype), shape))
        else:
            dtype = jax.numpy.bfloat16 if kind == "bf16" else kind.replace("f", "float")
            with np.errstate(over="ignore"):
                arrays.append(rng.choice(SPECIAL, shape).astype(dtype))
    return arrays


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    """Returns whether arrays are equal bit by bit, but for which NaN a NaN is."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if jax.numpy.issubdtype(got.dtype, np.floating):
        nan = np.isnan(want)
        if not np.array_equal(np.isnan(got), nan):
            return False
        got, want = (np.where(nan, np.ones((), x.dtype), x) for x in (got, want))
    return np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()


BITS = [
    case
    for case in GOLDEN
    if case.has is not None and case.exactness == "bitwise" and "f64" not in case.body
]


@pytest.mark.parametrize("case", BITS, ids=[f"{c.passes}-{c.name}" for c in BITS])
def test_compiled_results_keep_every_bit(case: Golden) -> None:
    text = program(case.arguments, case.body)
    after = normalize(text, case.passes, "bitwise")
    inputs = special_inputs(text)
    for got, want in zip(run(after, inputs), run(text, inputs), strict=True):
        assert same_bits(got, want)


def check_random_programs(seeds: range) -> None:
    """Compares random programs before and after the passes, in a random order.

    Zeros count as equal whatever their sign: for a constant that XLA can see, it
    takes x + 0.0 for x and mask * c for select(mask, c, 0.0), which is not so for
    -0.0, and the passes change what it sees.
    """
    for seed in seeds:
        made = RandomProgram(seed, steps=10 + seed % 40)
        order = list(np.random.default_rng(seed).permutation(BITWISE)) * 2
        after = normalize(made.text, ",".join(order), "bitwise")
        got, want = run(after, made.inputs), run(made.text, made.inputs)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            equal_nan = a.dtype.kind not in "biu"
            wide = np.float64 if equal_nan else a.dtype
            same = np.array_equal(a.astype(wide), b.astype(wide), equal_nan=equal_nan)
            assert same, f"seed {seed}, {order}\n{made.text}\n{after}"


def test_random_programs(enable_x64) -> None:
    check_random_programs(range(30))


@pytest.mark.slow
def test_more_random_programs(enable_x64) -> None:
    check_random_programs(range(1000, 1250))


@pytest.fixture
def enable_x64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def holds_every_value(old: ir.Type, new: ir.Type) -> bool:
    """Returns whether all values of an 8- or 16-bit type survive a conversion."""
    dtypes = [numpy_dtype(kind) for kind in (old, new)]
    if dtypes[1].kind in "iu" and dtypes[0].kind not in "biu":
        return False  # NaN
    bits = np.arange(2 if str(old) == "i1" else 2 ** (8 * dtypes[0].itemsize))
    values = bits.astype(f"u{dtypes[0].itemsize}").view(dtypes[0])
    with np.errstate(all="ignore"):
        values = values.astype(np.float64)
        back = values.astype(dtypes[1]).astype(np.float64)
    return np.array_equal(back, values, equal_nan=True)


def test_lossless_conversions_by_trying_every_value() -> None:
    module = StableHloModule.parse("module {}")
    with module.context:
        for old in ("i1", "i8", "ui8", "i16", "f16", "bf16", "f8E4M3FN", "f8E5M2"):
            for new in ("f16", "bf16", "f32", "i8", "i16", "ui8", "i32"):
                kinds = ir.Type.parse(old), ir.Type.parse(new)
                assert is_lossless(*kinds) == holds_every_value(*kinds), (old, new)


# ------------------------------------------------------- inlining, cse, dce

CALLS = """module {
  func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = call @outer(%x) : (tensor<4xf32>) -> tensor<4xf32>
    %1 = call @outer(%0) {mhlo.frontend_attributes = {_xla_compute_type = "host"}} : (tensor<4xf32>) -> tensor<4xf32>
    %2 = call @sharded(%1) : (tensor<4xf32>) -> tensor<4xf32>
    return %2 : tensor<4xf32>
  }
  func.func private @outer(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = call @inner(%x) : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
  func.func private @inner(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.negate %x : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
  func.func private @sharded(%x: tensor<4xf32> {mhlo.sharding = "{replicated}"}) -> tensor<4xf32> {
    return %x : tensor<4xf32>
  }
  func.func private @unused(%x: tensor<4xf32>) -> tensor<4xf32> {
    return %x : tensor<4xf32>
  }
}"""


def test_calls_are_inlined_unless_annotated() -> None:
    after = normalize(CALLS, "inline-calls,dce")
    main = after.partition("func.func private")[0]
    assert re.findall(r"call @(\w+)", main) == ["outer", "sharded"]
    assert "stablehlo.negate %arg0" in main
    assert "frontend_attributes" in main
    assert "@inner" not in after
    assert "@unused" not in after


def test_cse_keeps_barriers_and_annotated_operations_apart() -> None:
    equal = """%0 = stablehlo.optimization_barrier %x : tensor<4xf32>
    %1 = stablehlo.optimization_barrier %x : tensor<4xf32>
    %2 = stablehlo.custom_call @f(%x) : (tensor<4xf32>) -> tensor<4xf32>
    %3 = stablehlo.custom_call @f(%x) : (tensor<4xf32>) -> tensor<4xf32>
    %4 = stablehlo.abs %x {mhlo.sharding = "{replicated}"} : tensor<4xf32>
    %5 = stablehlo.abs %x {mhlo.sharding = "{replicated}"} : tensor<4xf32>
    %6 = stablehlo.abs %x : tensor<4xf32>
    %7 = stablehlo.abs %x : tensor<4xf32>
    return %0, %1, %2, %3, %4, %5, %6, %7 : """
    text = program("%x: tensor<4xf32>", equal + ", ".join(["tensor<4xf32>"] * 8))
    after = normalize(text, "cse")
    assert "return %0, %1, %2, %3, %4, %5, %6, %6" in after
    assert "hlo_tools" not in after


def test_cleanup_keeps_meshes_and_effects() -> None:
    text = """module {
      sdy.mesh @mesh = <["x"=2]>
      func.func public @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<4xf32> {
        %0 = stablehlo.custom_call @log(%x) {has_side_effect = true} : (tensor<4xf32>) -> tensor<4xf32>
        %1 = stablehlo.negate %x : tensor<4xf32>
        return %x : tensor<4xf32>
      }
    }"""
    after = normalize(text, "inline-calls,cse,dce")
    assert "sdy.mesh @mesh" in after
    assert "custom_call @log" in after
    assert "negate" not in after


# ------------------------------------------------------------------ whole programs


def jax_programs() -> dict[str, str]:
    """Returns lowered JAX functions with loops, branches and shardings."""

    def scanned(x):
        def step(carry, row):
            mask = jax.numpy.arange(4)[:, None] >= jax.numpy.arange(4)[None, :] + 0
            carry = jax.numpy.where(mask, carry @ row.T, -1e9) * 2.0 * 4.0
            return carry, jax.numpy.swapaxes(carry, 0, 1).T

        return jax.lax.scan(step, x, jax.numpy.stack([x, x]))

    def branches(x):
        return jax.lax.cond(x[0, 0] > 0, lambda y: y.T.T + 1, lambda y: -y, x)

    def remat(x):
        return jax.grad(lambda y: jax.checkpoint(jax.numpy.sin)(y.T).T.sum())(x)

    array = jax.ShapeDtypeStruct((4, 4), np.float32)
    functions = (scanned, branches, remat)
    return {f.__name__: jax.jit(f).lower(array).as_text() for f in functions}


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["scanned", "branches", "remat"])
def test_programs_with_regions(name) -> None:
    text = jax_programs()[name]
    after = normalize(text, f"{ALL},{ALL}", "bitwise")
    assert after.count("optimization_barrier") == text.count("optimization_barrier")
    inputs = [np.arange(16, dtype=np.float32).reshape(4, 4) / 8 - 1]
    for got, want in zip(run(after, inputs), run(text, inputs), strict=True):
        assert same_bits(got, want)


def check_zoo(folder, every: int) -> None:
    rows = json.loads((folder / "index.json").read_text())[::every]
    assert rows
    for row in rows:
        text = (folder / row["file"]).read_text()
        for passes in (*ALL.split(","), f"{ALL},{ALL}"):
            after = normalize(text, passes)
        assert normalize(after, ALL) == after, f"{row['name']} is not idempotent"


def test_zoo_sample_transforms_and_verifies(shared_dir) -> None:
    check_zoo(shared_dir / "zoo", every=10)


@pytest.mark.slow
def test_zoo_transforms_and_verifies(shared_dir) -> None:
    check_zoo(shared_dir / "zoo", every=1)
