"""The pattern driver, the readers and the builders."""

import numpy as np
import pytest
from jax.extend.mlir import ir

from hlo_tools import rewriting
from hlo_tools.module import StableHloModule
from hlo_tools.rewriting import Match, RewriteLimitError, producer, rewrite


def parse(body: str, arguments: str = "%x: tensor<4xf32>") -> StableHloModule:
    header = f"func.func public @main({arguments}) -> tensor<4xf32>"
    return StableHloModule.parse(f"module {{ {header} {{ {body} }} }}")


def drop_double_negation(op):
    inner = producer(op.operands[0], "stablehlo.negate")
    if inner is None:
        return None
    if not rewriting.is_plain(inner):
        return "annotated"
    return Match(op, lambda rewriter: inner.operands[0])


NEGATIONS = {"stablehlo.negate": (drop_double_negation,)}


def names(module: StableHloModule) -> list[str]:
    return [op.name.removeprefix("stablehlo.") for op in module.walk()]


@pytest.mark.smoke
def test_driver_rewrites_until_nothing_matches() -> None:
    chain = "\n".join(
        f"%{i + 1} = stablehlo.negate %{i} : tensor<4xf32>" for i in range(7)
    )
    module = parse(
        f"%0 = stablehlo.abs %x : tensor<4xf32>\n{chain}\nreturn %7 : tensor<4xf32>"
    )
    assert rewrite(module.module.operation, NEGATIONS) == 3
    module.verify()
    assert names(module).count("negate") == 1
    assert rewrite(module.module.operation, NEGATIONS) == 0


def test_driver_reaches_regions() -> None:
    module = parse(
        """%0 = stablehlo.while(%i = %x) : tensor<4xf32>
        cond { %c = stablehlo.constant dense<false> : tensor<i1>
               stablehlo.return %c : tensor<i1> }
        do { %a = stablehlo.negate %i : tensor<4xf32>
             %b = stablehlo.negate %a : tensor<4xf32>
             stablehlo.return %b : tensor<4xf32> }
        return %0 : tensor<4xf32>"""
    )
    assert rewrite(module.module.operation, NEGATIONS) == 1
    module.verify()
    assert "negate" not in names(module)


def test_driver_reports_reasons_and_keeps_annotated_operations() -> None:
    module = parse(
        """%0 = stablehlo.negate %x {mhlo.sharding = "{replicated}"} : tensor<4xf32>
        %1 = stablehlo.negate %0 : tensor<4xf32>
        return %1 : tensor<4xf32>"""
    )
    reasons = []
    count = rewrite(
        module.module.operation, NEGATIONS, lambda op, why: reasons.append(why)
    )
    assert (count, reasons) == (0, ["annotated"])


def test_new_operations_have_the_location_of_the_old() -> None:
    module = StableHloModule.parse(
        """module { func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
        %0 = stablehlo.negate %x : tensor<4xf32> loc("here.py":7:1)
        return %0 : tensor<4xf32> } }"""
    )

    def to_absolute(op):
        return Match(
            op, lambda rw: rw.create("stablehlo.abs", op.operands, op.result.type)
        )

    assert rewrite(module.module.operation, {"stablehlo.negate": (to_absolute,)}) == 1
    (made,) = module.walk("stablehlo.abs")
    assert "here.py" in str(made.location)
    assert "negate" not in names(module)


def test_patterns_that_undo_each_other_are_an_error() -> None:
    module = parse("%0 = stablehlo.negate %x : tensor<4xf32> return %0 : tensor<4xf32>")

    def again(op):
        return Match(op, lambda rw: rw.create(op.name, op.operands, op.result.type))

    with pytest.raises(RewriteLimitError, match="negate"):
        rewrite(module.module.operation, {"stablehlo.negate": (again,)})


def test_a_pattern_may_not_change_a_type() -> None:
    module = parse("%0 = stablehlo.negate %x : tensor<4xf32> return %0 : tensor<4xf32>")

    def wrong(op):
        return Match(op, lambda rw: rw.reshape(op.operands[0], (2, 2)))

    with pytest.raises(TypeError, match="replaced by"):
        rewrite(module.module.operation, {"stablehlo.negate": (wrong,)})


def test_dead_operations_are_erased_but_not_those_with_effects() -> None:
    module = parse(
        """%0 = stablehlo.abs %x : tensor<4xf32>
        %1 = stablehlo.custom_call @f(%0) : (tensor<4xf32>) -> tensor<4xf32>
        %2 = stablehlo.sine %1 : tensor<4xf32>
        %3 = stablehlo.negate %2 : tensor<4xf32>
        return %3 : tensor<4xf32>"""
    )

    def to_argument(op):
        argument = op.block.arguments[0]
        return Match(op, lambda rewriter: argument)

    rewrite(module.module.operation, {"stablehlo.negate": (to_argument,)})
    assert names(module)[:3] == ["abs", "custom_call", "func.return"]


SPLATS = [
    ("dense<1.5> : tensor<2x3xf32>", np.float32(1.5)),
    ("dense<-0.0> : tensor<f64>", np.float64(-0.0)),
    ("dense<[2, 2]> : tensor<2xi8>", np.int8(2)),
    ("dense<200> : tensor<3xui8>", np.uint8(200)),
    ("dense<true> : tensor<3xi1>", np.bool_(True)),
    ("dense<1.0> : tensor<0xf32>", np.float32(1)),
    ("dense<[1.0, 2.0]> : tensor<2xf32>", None),
    ("dense<(1.0, 2.0)> : tensor<2xcomplex<f32>>", None),
]


@pytest.mark.parametrize(("text", "value"), SPLATS)
def test_splats_are_read_as_numpy(text, value) -> None:
    module = parse(f"%c = stablehlo.constant {text}\nreturn %x : tensor<4xf32>")
    (op,) = module.walk("stablehlo.constant")
    found = rewriting.splat_value(op.results[0])
    if value is None:
        assert found is None
    else:
        assert found.dtype == value.dtype
        assert found.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "text", ["bf16", "f8E4M3FN", "f8E5M2", "f8E4M3B11FNUZ", "f4E2M1FN", "i4", "ui2"]
)
def test_numpy_types_of_narrow_elements(text) -> None:
    with parse("return %x : tensor<4xf32>").context:
        kind = ir.Type.parse(text)
        dtype = rewriting.numpy_dtype(kind)
    digits = "".join(c for c in dtype.name.partition("_")[0] if c.isdigit())
    assert text == "bf16" or text.lstrip("uif").startswith(digits)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("tensor<2x3xf32>", (2, 3)),
        ("tensor<0xi4>", (0,)),
        ("tensor<complex<f32>>", ()),
        ("tensor<?x3xf32>", None),
        ("tensor<?xf32, #stablehlo.bounds<4>>", None),
        ("!stablehlo.token", None),
        ("tuple<tensor<2xf32>>", None),
    ],
)
def test_shapes_of_what_the_passes_leave_alone_are_none(kind, shape) -> None:
    module = StableHloModule.parse(
        f"module {{ func.func public @main(%x: {kind}) {{ return }} }}"
    )
    assert rewriting.shape_of(module.main.regions[0].blocks[0].arguments[0]) == shape


def test_permutations() -> None:
    permutation = (2, 0, 1)
    assert rewriting.permuted("abc", permutation) == ("c", "a", "b")
    assert rewriting.permuted("cab", rewriting.inverse(permutation)) == tuple("abc")
    assert rewriting.is_identity((0, 1))
    assert not rewriting.is_identity((1, 0))
