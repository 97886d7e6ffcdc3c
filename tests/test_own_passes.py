"""Passes that other packages register by entry point, and their golden files."""

import sys

import pytest

import hlo_tools
from hlo_tools.errors import PassSpecError, UnknownNameError
from hlo_tools.pipeline import PassPipeline
from hlo_tools.testing import assert_golden

TEXT = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.negate %x : tensor<4xf32>
  %1 = stablehlo.negate %0 : tensor<4xf32>
  %2 = stablehlo.sine %1 : tensor<4xf32>
  return %2 : tensor<4xf32>
}
"""
METADATA = "Metadata-Version: 2.1\nName: their-passes\nVersion: 1.0\n"
LINES = "\n".join(
    f"{name} = {place}"
    for name, place in {
        "drop-twice": "their_passes:DropTwice",
        "no-pass": "their_passes:nothing",
    }.items()
)


@pytest.fixture
def their_package(tmp_path, monkeypatch, repo_dir):
    """A package with the pass of the example, as pip would have installed it."""
    example = (repo_dir / "examples" / "03_own_pass.py").read_text()
    start, stop = example.index("@dataclass"), example.index("def twice_negated")
    code = example[start:stop].replace("DropDoubleNegation", "DropTwice")
    imports = example[example.index("from dataclasses") : start]
    imports = "\n".join(x for x in imports.splitlines() if "import" in x)
    source = f"{imports}\nnothing = 1\n{code}".replace(
        "drop-double-negation", "drop-twice"
    )
    (tmp_path / "their_passes.py").write_text(source)
    info = tmp_path / "their_passes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: their-passes\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[hlo_tools.passes]\n{LINES}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield len(code.strip().splitlines())
    sys.modules.pop("their_passes", None)


def test_a_registered_pass_goes_by_its_name(their_package, tmp_path):
    assert their_package < 20
    rewritten = hlo_tools.rewrite_text(TEXT, passes="cse,drop-twice,dce")
    assert "negate" not in rewritten
    spec = str(PassPipeline.parse("drop-twice,dce"))
    assert PassPipeline.parse(spec) == PassPipeline.parse("drop-twice,dce")
    golden = tmp_path / "golden.mlir"
    with pytest.raises(AssertionError, match="no golden file"):
        assert_golden(rewritten, golden)
    assert_golden(rewritten, golden, update=True)
    assert_golden(rewritten, golden)
    with pytest.raises(AssertionError, match="negate"):
        assert_golden(TEXT, golden)


def test_names_that_are_no_passes(their_package):
    with pytest.raises(PassSpecError, match="is no pass"):
        PassPipeline.parse("no-pass")
    with pytest.raises(UnknownNameError, match="drop-twice"):
        PassPipeline.parse("drop-twyce")
