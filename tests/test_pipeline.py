"""Pipeline specs, the table of passes, and the run of a pipeline."""

import dataclasses

import pytest

from hlo_tools import PassPipeline, StableHloModule, rewrite_text
from hlo_tools.driver import run_passes
from hlo_tools.errors import MlirParseError, PassSpecError, UnknownNameError
from hlo_tools.passes import ALIASES, PASSES
from hlo_tools.pipeline import EXACTNESS, load_pass, make_pass
from hlo_tools.targets import Target

TEXT = """
module @small {
  func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %x, %x : tensor<4xf32>
    %1 = stablehlo.add %x, %x : tensor<4xf32>
    %2 = stablehlo.multiply %0, %1 : tensor<4xf32>
    return %2 : tensor<4xf32>
  }
}
"""


@pytest.mark.smoke
@pytest.mark.parametrize(
    "spec",
    [
        "cse",
        "outline-attention{max-rank=5}",
        "inline-calls,outline-attention{max-rank=5 min-keys=2},dce",
        "",
    ],
)
def test_spec_prints_back(spec):
    assert str(PassPipeline.parse(spec)) == spec


def test_defaults_are_not_printed():
    spec = "outline-attention{max-rank=8},cse"
    assert str(PassPipeline.parse(spec)) == "outline-attention,cse"


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_expand_to_passes(name):
    pipeline = PassPipeline.parse(name)
    assert PassPipeline.parse(str(pipeline)) == pipeline


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_keeps_the_contract(name):
    cls = load_pass(name)
    assert cls.name == name
    assert cls.exactness in EXACTNESS
    assert cls.summary
    assert cls.__doc__
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    default = cls()
    for field in dataclasses.fields(cls):
        assert field.default is not dataclasses.MISSING
        option = field.name.replace("_", "-")
        documented = option in cls.__doc__ or field.name in cls.__doc__
        assert documented, f"option {option} is not documented"
        text = str(field.default).lower()
        if text:
            assert make_pass(name, {option: text}) == default


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("outline-attentoin", "outline-attention"),
        ("nomralize", "normalize"),
        ("outline-attention{maxrank=5}", "max-rank"),
    ],
)
def test_unknown_names_are_answered_with_the_closest(spec, says):
    with pytest.raises(UnknownNameError, match=says):
        PassPipeline.parse(spec)


@pytest.mark.parametrize(
    "spec", ["cse dce", "cse,,dce", "outline-attention{max-rank=x}", "cse}", "clean{a}"]
)
def test_malformed_specs(spec):
    with pytest.raises((PassSpecError, UnknownNameError)):
        PassPipeline.parse(spec)


def test_run_reports_times_and_counts():
    module = StableHloModule.parse(TEXT)
    module, report = run_passes(module, "cse,dce", Target.parse("cpu"))
    assert [(p.name, p.ops_before, p.ops_after) for p in report.passes] == [
        ("cse", 3, 2),
        ("dce", 2, 2),
    ]
    assert report.passes[0].changed
    assert report.passes[0].seconds > 0
    module.verify()


def test_exactness_skips_looser_passes():
    module = StableHloModule.parse(TEXT)
    _, report = run_passes(module, "fold-scales,cse", Target.parse("cpu"), "bitwise")
    assert [p.name for p in report.passes] == ["cse"]
    assert any("fold-scales" in note for note in report.notes)


@pytest.mark.smoke
def test_rewrite_text():
    assert rewrite_text(TEXT, passes="cse").count("stablehlo.add") == 1


def test_bad_mlir_names_the_line():
    with pytest.raises(MlirParseError, match="<string>:4"):
        rewrite_text(TEXT.replace("stablehlo.add %x, %x", "stablehlo.nothing %x", 1))


@pytest.mark.parametrize(
    "spec",
    [
        "cse,bisect_fixtures:SubtractForAdd,dce",
        "bisect_fixtures:SubtractForAdd{enabled=false}",
    ],
)
def test_passes_of_ones_own_print_back_and_run(spec):
    pipeline = PassPipeline.parse(spec)
    assert str(pipeline) == spec
    module, report = run_passes(StableHloModule.parse(SUM), spec, Target.parse("cpu"))
    assert ("stablehlo.subtract" in module.as_text()) == ("false" not in spec)
    assert "bisect_fixtures:SubtractForAdd" in [one.name for one in report.passes]


SUM = TEXT.replace("stablehlo.multiply", "stablehlo.add")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gone_module:Pass", "can not import the pass gone_module:Pass: ModuleNot"),
        ("bisect_fixtures:Gone", "AttributeError"),
        ("bisect_fixtures:accepts", "expected a frozen dataclass"),
        ("hlo_tools.report:SiteReport", "it lacks name, exactness, summary, run"),
        (
            "bisect_fixtures:OddExactness",
            "got exactness 'odd', expected one of bitwise",
        ),
        ("bisect_fixtures:SubtractForAdd{on=true}", "enabled"),
        ("bisect_fixtures:", "unknown pass 'bisect_fixtures'"),
    ],
)
def test_passes_that_can_not_be_had(spec, says):
    with pytest.raises((PassSpecError, UnknownNameError), match=says):
        PassPipeline.parse(spec)
