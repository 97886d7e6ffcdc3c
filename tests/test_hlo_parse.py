"""HLO text: every file parses, prints and parses again; cut files never fail."""

import random
import re
import warnings

import pytest
from hlo_corpus import ROOT, files, index, needs_corpus

from hlo_tools.hlo import HloParseError, HloParseWarning, Shape
from hlo_tools.hlo.attributes import replica_groups
from hlo_tools.hlo.parser import parse_text

pytestmark = needs_corpus
CUTS = 4


def quietly(text: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HloParseWarning)
        return parse_text(text)


@pytest.mark.parametrize("name", files())
def test_parse_print_parse(name):
    module = quietly((ROOT / name).read_text())
    assert module.computations
    assert quietly(module.as_text()) == module
    assert not any(c.undefined for c in module.computations)


@pytest.mark.parametrize("row", index(), ids=lambda row: row["file"])
def test_counts(row):
    module = quietly((ROOT / row["file"]).read_text())
    assert module.is_scheduled == row["scheduled"]
    if "instructions" in row:
        assert sum(map(len, module.computations)) == row["instructions"]
        assert len(module.computations) == row["computations"]
        assert module.is_complete


@pytest.mark.parametrize("name", files())
def test_cut_anywhere(name):
    text = (ROOT / name).read_text()
    rng = random.Random(name)
    for _ in range(CUTS):
        cut = text[: rng.randrange(len(text))]
        try:
            module = quietly(cut)
        except HloParseError:
            assert "parameter(" not in re.sub("//.*", "", cut)
            continue
        quietly(module.as_text())


def test_unknown_things_are_kept_and_warned_about_once():
    first = "a = f3e1[4]{0} parameter(0), newer={x}"
    text = f"e {{\n  {first}\n  ?? what\n  b = f3e1[4] negate(a)\n}}"
    with pytest.warns(HloParseWarning, match="unknown element types f3e1") as caught:
        module = parse_text(text)
    assert len(caught) == 1
    assert module.computations[0]["a"].attributes == {"newer": "{x}"}
    assert [u.text.strip() for u in module.unparsed] == ["?? what"]


def test_sizes_and_groups():
    assert Shape.parse("s4[9]{0:E(4)}").byte_size == 5
    assert Shape.parse("s4[9]{0}").byte_size == 9
    assert Shape.parse("(f32[2,3], pred[4])").byte_size == 28
    assert Shape.parse("bf16[9,100]{1,0:T(8,128)(2,1)S(1)}").padded_byte_size == 4096
    assert replica_groups("[2,2]<=[2,2]T(1,0)") == ((0, 2), (1, 3))
    assert replica_groups("mesh['x'=2,'y'=2] {'y'}") == ((0, 1), (2, 3))
