"""`hlo_tools.testing`: helpers for tests of one's own find what they should."""

import bisect_fixtures as fixtures
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlo_tools
from hlo_tools import binding, verify
from hlo_tools.testing import assert_equivalent, assert_golden, measure_gain, normalized
from hlo_tools.verify_program import argument_types, verify_texts, widened

WRONG = "inline-calls,bisect_fixtures:SubtractForAdd,normalize,outline-attention"
WRONG += ",bind-kernels,inline-composites,clean"


@pytest.fixture
def bind_everything(monkeypatch):
    monkeypatch.setattr(binding, "FASTER", float("inf"))


@pytest.fixture
def inputs():
    return list(jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8)))


def attend(q, k, v, scale=0.3):
    out = fixtures.attention(q, k, v, scale)
    return {"out": out, "mean": out.mean()}


def residual(tree, v, *, shift):
    out = fixtures.attention(tree["q"], tree["k"], v, 0.3)
    return out + shift


def test_equal_functions(bind_everything, inputs):
    found = assert_equivalent(attend, *inputs, min_bound=1)
    assert [site.status for site in found.report.sites] == ["bound"]
    assert found.gradient_report is None
    assert 0 < found.largest_error < 2e-5  # another program did run
    assert found.report.module == "jit_attend"


@pytest.mark.parametrize("grad", [True, 0, (0, -1)])
def test_gradients(bind_everything, inputs, grad):
    q, k, v = inputs
    tree = {"q": q, "k": k, "step": jnp.arange(3)}
    found = assert_equivalent(residual, tree, v, shift=v * 2, grad=grad)
    report = found.gradient_report
    assert report.module == "jit_residual_gradient"
    assert report.sites


def test_a_decorated_function_is_compared_with_what_it_decorates(
    bind_everything, inputs
):
    decorated = hlo_tools.jit(attend)
    found = assert_equivalent(decorated, *inputs, min_bound=1)
    assert found.largest_error > 0
    with hlo_tools.install():
        assert assert_equivalent(attend, *inputs, min_bound=1).largest_error > 0


def test_a_difference_is_named(bind_everything, inputs):
    q, k, v = inputs
    tree = {"q": q, "k": k}
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(residual, tree, v, shift=v, passes=WRONG)
    message = str(caught.value)
    assert message.startswith("residual: result differs under hlo_tools.jit: error ")
    for part in ("tolerance 2e-05", "hlo_tools: 1/1 attention site bound on cpu", "hlo"
                 "-tools bisect"):  # fmt: skip
        assert part in message


def test_a_wrong_leaf_is_named(bind_everything, inputs, monkeypatch):
    monkeypatch.setattr(fixtures, "VICTIMS", [0.3])
    rows = {"broken": fixtures.broken()}
    monkeypatch.setattr(binding, "load_implementations", lambda _: rows)
    monkeypatch.setattr(binding, "_lowered", {})
    monkeypatch.setattr(fixtures, "VICTIMS", [0.3])
    with pytest.raises(AssertionError, match=r"attend: result\['mean'\] differs"):
        assert_equivalent(attend, *inputs)
    assert_equivalent(attend, *inputs, tolerance=0.3)


def test_a_wrong_gradient_is_named(inputs):
    """The forward program is right; in the backward one a sum is a difference."""
    passes = "inline-calls,bisect_fixtures:BreakBackward"

    def twice(x):
        return x * x + x * 3.0

    with pytest.raises(
        AssertionError, match=r"twice_gradient: gradient\['args\[0\]'\]"
    ):
        assert_equivalent(twice, inputs[0], grad=True, passes=passes)
    assert_equivalent(twice, inputs[0], passes=passes)


def test_low_precision_is_held_against_float32(bind_everything, inputs):
    low = [x.astype(jnp.bfloat16) for x in inputs]
    found = assert_equivalent(attend, *low, grad=True)
    assert found.report.sites[0].attributes["dtype"] == "bfloat16"
    with pytest.raises(AssertionError, match=r"differs"):
        assert_equivalent(attend, *low, tolerance=0.0)


def test_too_little_is_bound(inputs):
    with pytest.raises(AssertionError, match="0 sites are bound, expected at least 1"):
        assert_equivalent(jnp.sin, inputs[0], min_bound=1)


def test_what_can_not_be_differentiated():
    with pytest.raises(ValueError, match="none of these inputs is a float"):
        assert_equivalent(lambda n: n * 1.5, jnp.arange(3), grad=True)
    with pytest.raises(ValueError, match="no result is a float"):
        assert_equivalent(lambda x: x > 0, jnp.ones(3), grad=True)


def test_measured_gain(bind_everything, inputs):
    report = measure_gain(attend, *inputs, rounds=3)
    assert set(report.measured) == {"baseline_seconds", "seconds"}
    assert all(seconds > 0 for seconds in report.measured.values())
    assert "; measured " in report.summary_line()
    assert report.with_status("bound")
    with pytest.raises(ValueError, match="rounds=0"):
        measure_gain(attend, *inputs, rounds=0)


# Golden files.

TEXT = """
module @m {
  func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %x, %x : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


def test_golden_files(tmp_path, monkeypatch):
    path = tmp_path / "golden" / "add.mlir"
    with pytest.raises(AssertionError, match="HLO_TOOLS_UPDATE_GOLDEN=1"):
        assert_golden(TEXT, path)
    monkeypatch.setenv("HLO_TOOLS_UPDATE_GOLDEN", "1")
    assert_golden(TEXT, path)
    monkeypatch.setenv("HLO_TOOLS_UPDATE_GOLDEN", "0")
    assert_golden(TEXT, path)
    assert_golden(TEXT.replace("%x", "%other").replace("  ", " "), path)
    with pytest.raises(AssertionError) as caught:
        assert_golden(TEXT.replace("add", "multiply"), path)
    assert "-    %0 = stablehlo.add %arg0, %arg0" in str(caught.value)
    assert "+    %0 = stablehlo.multiply %arg0, %arg0" in str(caught.value)
    assert_golden(TEXT.replace("add", "multiply"), path, update=True)
    assert "multiply" in path.read_text()


def test_normalized_text():
    assert normalized(TEXT) == normalized(normalized(TEXT))
    assert normalized("no MLIR  \n") == "no MLIR\n"


# The programs that low-precision ones are held against.


def test_widened_constants():
    numbers = np.linspace(-3, 3, 40).astype(jnp.bfloat16)

    def f(x):
        return x * numbers + jnp.bfloat16(-jnp.inf), x.astype(jnp.float16)

    text = jax.jit(f).lower(jax.ShapeDtypeStruct((40,), jnp.bfloat16)).as_text()
    text = text.replace(" : tensor<40xbf16>", " : tensor<40xbf16>")
    wide = widened(text)
    assert {str(t.dtype) for t in argument_types(wide)} == {"float32"}
    for word in ("bf16", "f16"):
        assert word not in wide
    x = np.ones(40, np.float32)
    (first, second) = verify.run_text(wide, [x], "cpu")
    assert np.all(np.isneginf(first))
    np.testing.assert_array_equal(second, x)


def test_widened_arrays_keep_their_values():
    """MLIR prints large arrays as the bytes they are."""
    numbers = np.arange(4, dtype=np.float32).astype(jnp.bfloat16) - jnp.bfloat16(1.5)
    digits = numbers.tobytes().hex().upper()
    text = f"""
    func.func public @main() -> tensor<4xbf16> {{
      %0 = stablehlo.constant dense<"0x{digits}"> : tensor<4xbf16>
      return %0 : tensor<4xbf16>
    }}"""
    (got,) = verify.run_text(widened(text), [], "cpu")
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, numbers.astype(np.float32))
    assert widened(text.replace("bf16", "f32")) is None


# Several results.


def test_the_worst_of_several_results_is_reported():
    good, bad = np.ones(3, np.float32), np.full(3, 1.5, np.float32)
    nan = np.full(3, np.nan, np.float32)
    found = verify.compare_all([good, bad, good], [good, good, good], 0.1)
    assert not found.passed
    assert found.max_error == pytest.approx(0.5)
    assert found.detail == "result 1 of 3"
    found = verify.compare_all([good, bad, nan], [good, good, good], 1.0)
    assert found.detail == "result 2 of 3: 3 NaNs differ"
    found = verify.compare_all([good, bad], [good, good], 1.0)
    assert found.passed
    assert found.max_error == pytest.approx(0.5)
    assert verify.compare_all([good], [good], 0.0).detail == ""
    assert not verify.compare_all([good], [good, good], 1.0).passed
    assert not verify.compare_all([good], [good.astype(np.float16)], 1.0).passed
    assert not verify.compare_all([good[:1]], [good], 1.0).passed


def test_texts_of_several_results():
    x = jax.ShapeDtypeStruct((4,), jnp.float32)

    def text(f):
        return jax.jit(f).lower(x).as_text()

    one = text(lambda x: (x, x * 2))
    other = text(lambda x: (x, x * 2.5))
    same = verify_texts(one, one, [x], [0], "cpu", 1e-6, 1)
    assert same.passed
    assert same.detail == "result 0 of 2; 2 sets of random inputs on cpu"
    found = verify_texts(one, other, [x], [0], "cpu", 1e-6, 1)
    assert not found.passed
    assert found.detail.startswith("result 1 of 2")
    assert found.max_error == pytest.approx(0.25)
