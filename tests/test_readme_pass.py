"""The pass in the README is one, and does what it says."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import hlo_tools
from hlo_tools.pipeline import PassPipeline

README = Path(__file__).parents[1] / "README.md"


def twice(x):
    return jnp.negative(jnp.negative(x))


@pytest.fixture
def my_passes(tmp_path, monkeypatch):
    (found,) = re.findall(
        r"```python\n# my_passes\.py\n(.*?)```", README.read_text(), re.DOTALL
    )
    (tmp_path / "my_passes.py").write_text(found)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_pass_of_the_readme(my_passes):
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    text = jax.jit(lambda x: (twice(x), twice(jnp.sin(x)))).lower(x).as_text()
    for keep, left in ((0, 0), (1, 2), (2, 4)):
        spec = f"my_passes:DropDoubleNegation{{keep={keep}}},dce"
        rewritten = hlo_tools.rewrite_text(text, passes=spec)
        assert rewritten.count("stablehlo.negate") == left
    spec = "normalize,\nmy_passes:DropDoubleNegation"
    assert str(PassPipeline.parse(spec)).endswith(",my_passes:DropDoubleNegation")
    assert hlo_tools.jit(twice, passes=spec)(2.0) == 2.0
