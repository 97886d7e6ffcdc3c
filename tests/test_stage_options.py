"""Options that name nothing are refused where they are given."""

import jax.numpy as jnp
import numpy as np
import pytest

import hlo_tools
from hlo_tools import cli
from hlo_tools.errors import HloToolsError, UnknownNameError

SPEC = "normalize,outline-attention,bind-kernels{only=onlin}"


def attention(x):
    scores = jnp.einsum("qd,kd->qk", x, x)
    return jnp.exp(scores) @ x


def test_an_implementation_that_is_not_there():
    for refused in (
        lambda: hlo_tools.jit(attention, passes=SPEC),
        lambda: hlo_tools.jit(passes=SPEC),
        lambda: hlo_tools.install(passes=SPEC),
    ):
        with pytest.raises(UnknownNameError, match="did you mean online"):
            refused()
    hlo_tools.jit(attention, passes=SPEC.replace("onlin", "online"))


def test_the_command_refuses_it_too(capsys):
    assert cli.main(["opt", "no-such-file.mlir", "--passes", SPEC]) == 2
    assert "unknown implementation 'onlin'" in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["nonsense", "cse{", SPEC])
def test_the_environment_variable_is_named(monkeypatch, spec):
    monkeypatch.setenv("HLO_TOOLS_PASSES", spec)
    ours = hlo_tools.jit(lambda x: attention(x) + 1)
    x = jnp.ones((4, 4))
    with pytest.warns(RuntimeWarning, match="HLO_TOOLS_PASSES="):
        got = ours(x)
    np.testing.assert_array_equal(got, attention(x) + 1)
    assert f"HLO_TOOLS_PASSES={spec}: " in ours.report().notes[0]


def test_settings_of_ones_own_are_not_blamed_on_the_environment():
    with pytest.raises(HloToolsError) as caught:
        hlo_tools.jit(attention, passes="nonsense")
    assert "HLO_TOOLS_PASSES" not in str(caught.value)
