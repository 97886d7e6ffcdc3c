"""`hlo_tools.hlo.diff` and its command on single changes of one small module."""

import json
import re

import pytest

from hlo_tools.cli import main
from hlo_tools.errors import UnknownNameError
from hlo_tools.hlo import diff as differ

MODULE = """HloModule m, is_scheduled=false

ENTRY main {
  x = f32[4,8]{1,0} parameter(0)
  y = f32[8]{0} parameter(1)
  wide = f32[4,8]{1,0} broadcast(y), dimensions={1}
  difference = f32[4,8]{1,0} subtract(x, wide)
  two = f32[] constant(2)
  twos = f32[4,8]{1,0} broadcast(two), dimensions={}
  power = f32[4,8]{1,0} power(difference, twos)
  tanh = f32[4,8]{1,0} tanh(power)
  ROOT out = f32[4,8]{1,0} multiply(tanh, x)
}
"""

# name -> a change of MODULE, and the kind of difference that it is
CHANGES: dict[str, tuple[tuple[str, str], str]] = {
    "nothing": (("", ""), "none"),
    "names": ((r"\bdifference\b", "delta.7"), "none"),
    "metadata": ((r"tanh\(power\)", 'tanh(power), metadata={op_name="f"}'), "none"),
    "constant": ((r"constant\(2\)", "constant(3)"), "constants"),
    "wiring": ((r"subtract\(x, wide\)", "subtract(wide, x)"), "wiring"),
    "opcode": ((r"tanh\(power\)", "sine(power)"), "ops"),
    "removed": ((r"multiply\(tanh, x\)", "multiply(power, x)"), "ops"),
    "another operand": ((r"multiply\(tanh, x\)", "multiply(tanh, wide)"), "wiring"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change(name: str) -> None:
    (pattern, new), kind = CHANGES[name]
    changed = re.sub(pattern, new, MODULE) if pattern else MODULE
    assert (changed == MODULE) == (name == "nothing")
    for a, b in ((MODULE, changed), (changed, MODULE)):
        found = differ.diff(a, b)
        assert (found.kind == "none") == (kind == "none"), found.kind
        if name in ("constant", "wiring", "opcode"):
            assert found.kind == kind


def test_order_of_the_text_is_no_difference() -> None:
    lines = MODULE.splitlines()
    lines[5], lines[7] = lines[7], lines[5]
    assert differ.diff(MODULE, "\n".join(lines)).is_same


def test_ignored_aspects() -> None:
    other = MODULE.replace("constant(2)", "constant(3)")
    assert differ.diff(MODULE, other, ignore=["constants"]).is_same
    with pytest.raises(UnknownNameError, match="aspect"):
        differ.diff(MODULE, other, ignore=["constant"])


def test_command(tmp_path, capsys) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text(MODULE)
    b.write_text(MODULE.replace("tanh(power)", "sine(power)"))
    assert main(["diff", str(a), str(a)]) == 0
    assert main(["diff", str(a), str(b)]) == 1
    assert "tanh" in capsys.readouterr().out
    assert main(["diff", str(a), str(b), "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "ops"
    assert main(["diff", str(a), str(tmp_path / "none.txt")]) == 2


def test_page(tmp_path) -> None:
    """Both modules whole, escaped, and each instruction leads to its counterpart."""
    a, b, page = (tmp_path / name for name in ("a.txt", "b.txt", "page.html"))
    a.write_text(MODULE.replace("tanh(power)", 'tanh(power), metadata={op_name="<&>"}'))
    b.write_text(MODULE.replace("tanh(power)", "sine(power)"))
    assert main(["diff", str(a), str(b), "-o", str(page)]) == 1
    text = page.read_text()
    assert "<&>" not in text
    assert "&lt;&amp;&gt;" in text
    lines = dict(re.findall(r"<p id=(\w+)(.*)</p>", text))
    assert len(lines) == 2 * 9
    changed = [id for id, line in lines.items() if " class=" in line]
    assert [re.search(r"= \S+ (\w+)", lines[id])[1] for id in changed] == [
        "tanh", "sine",
    ]  # fmt: skip
    targets = {id: re.search(r"data-to=(\w+)", line) for id, line in lines.items()}
    assert sum(found is not None for found in targets.values()) >= 2 * 8
    for id, found in targets.items():
        if found is not None:
            back = targets[found[1]]
            assert back is not None
            assert back[1] == id
    assert re.search(r'href="#a\d+">tanh', text)
    assert "http" not in text.replace("http-equiv", "")


def test_baseline(tmp_path, capsys) -> None:
    a, b, baseline = (tmp_path / name for name in ("a.txt", "b.txt", "base.json"))
    a.write_text(MODULE)
    assert main(["diff", str(a), "--baseline", str(baseline), "--update"]) == 0
    assert main(["diff", str(a), "--baseline", str(baseline)]) == 0
    b.write_text(re.sub(r"\bdifference\b", "delta.7", MODULE))
    assert main(["diff", str(b), "--baseline", str(baseline)]) == 0
    b.write_text(MODULE.replace("tanh(power)", "sine(power)"))
    capsys.readouterr()
    assert main(["diff", str(b), "--baseline", str(baseline)]) == 1
    assert "sine" in capsys.readouterr().out
