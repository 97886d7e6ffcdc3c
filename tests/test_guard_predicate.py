"""Whether every query sees a key, asked when a program runs, and what asking costs."""

import jax
import numpy as np
import pytest

from hlo_tools.composites import AttentionSpec, SideSpec
from hlo_tools.targets import Target
from pallas_kernels.attention import guard, online


def spec_of(shape, **fields) -> AttentionSpec:
    """A guarded site of one head with a mask, a bias, or a float side that is both."""
    dtypes = ["float32"] * 7
    sides = (SideSpec(shape, "float32"),)
    return AttentionSpec(1, 6, 9, 1, 1, 4, 4, *dtypes, sides=sides, guarded=True,
                         mask_fill=-1e9, rows_never_empty=False, **fields)  # fmt: skip


@pytest.mark.parametrize(
    "band",
    [{}, {"causal": True}, {"causal": True, "offset": 2}, {"causal": True, "offset": 8},
     {"causal": True, "offset": 30}, {"window": (1, 0)}, {"window": (0, 3)},
     {"window": (2, None)}, {"window": (None, 1), "offset": 1}],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 9), (1, 1, 1, 6, 9), (1, 1, 1, 6, 1)])
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_predicate(kind, shape, band):
    """It says of random sides what the definition says."""
    spec = spec_of(
        shape,
        has_mask=kind == "mask",
        has_bias=kind == "bias",
        mask_fn=lambda sides, *_: sides[0] > -1.0,
        bias_fn=lambda sides, *_: sides[0] * 1e3,
        **band,
    )
    predicate = jax.jit(lambda side: guard.every_query_sees_a_key(spec, side))
    low, high = spec.band
    distance = np.arange(9) - np.arange(6)[:, None]
    inside = distance >= (-99 if low is None else low)
    inside &= distance <= (99 if high is None else high)
    rng = np.random.default_rng(2)
    answers = set()
    for hidden in (0.0, 0.3, 0.6, 0.8, 1.0) * 4:
        side = np.where(rng.random(shape) < hidden, -2.0, 0.5).astype(np.float32)
        want = (inside & (side[0, 0, 0] > -1)).any(-1).all()
        assert bool(predicate(side)) == want
        answers.add(bool(want))
    assert answers == {False, True}


@pytest.mark.parametrize(("value", "fine"), [
    (-1e3, True), (-1.1e3, False), (1e3, True), (1.1e3, False), (np.nan, False),
    (np.inf, False), (-np.inf, False),
])  # fmt: skip
def test_limits_of_a_bias(value, fine):
    spec = spec_of((1, 1, 1, 6, 1), has_bias=True, bias_fn=lambda sides, *_: sides[0])
    side = np.zeros((1, 1, 1, 6, 1), np.float32)
    side[..., 4, 0] = value
    assert bool(guard.every_query_sees_a_key(spec, side)) == fine


def test_cost_of_the_guard():
    """A guarded site costs more, and memory for either branch."""
    spec = spec_of((1, 1, 1, 6, 9), has_mask=True, causal=True,
                   mask_fn=lambda sides, *_: sides[0] > 0)  # fmt: skip
    target = Target.parse("cpu")
    mine = guard.guarded(online.IMPLEMENTATION, spec)
    plain = guard.kernel_spec(spec)
    own = online.IMPLEMENTATION
    assert mine.seconds(spec, target) > own.seconds(plain, target)
    assert mine.temp_bytes(spec, target) >= own.temp_bytes(plain, target)
