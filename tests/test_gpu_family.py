"""The Hopper attention families: tiles counted, limits, and what predictions follow."""

import heapq
import itertools
import math
import time

import numpy as np
import pytest

from hlo_tools.errors import UnsupportedError
from hlo_tools.targets import Target
from pallas_kernels.attention import gpu_family, gpu_presets, hopper_attention
from pallas_kernels.attention.gpu_family import (
    BACKWARD,
    FORWARD,
    BackwardConfig,
    ForwardConfig,
)
from pallas_kernels.attention.hopper_model import (
    AT_MOST_ONE,
    CONSTANTS,
    default_constants,
)
from pallas_kernels.attention.hopper_tiles import makespan, tile_counts, transposed
from pallas_kernels.attention.problem import AttentionProblem
from pallas_kernels.fitting import fit
from pallas_kernels.tuning import ConfigSelector

H200 = Target.parse("h200")
FAMILIES = (FORWARD, BACKWARD)
by_name = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def problem(length=4096, depth=128, heads=16, batch=2, **parts) -> AttentionProblem:
    sizes = {"q_len": length, "k_len": length, "heads": heads, "kv_heads": heads}
    depths = {"head_dim": depth, "value_dim": depth, "dtype": "bfloat16"}
    return AttentionProblem(**{"batch": batch, **sizes, **depths, **parts})


def seconds(family, what, target=H200) -> float:
    return ConfigSelector(family, target).select(what).prediction.seconds


BANDS = [(None, None), (None, 0), (-7, 0), (-3, 5), (None, 9), (4, None), (40, 50)]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("rows", "cols"), [(32, 32), (37, 29), (5, 50)])
def test_tiles_are_counted_as_by_hand(rows, cols, band) -> None:
    low, high = band
    for block_rows, block_cols in ((8, 8), (16, 4), (4, 12)):
        distance = np.arange(cols)[None] - np.arange(rows)[:, None]
        seen = (distance >= -99 if low is None else distance >= low) & (
            distance <= 99 if high is None else distance <= high
        )
        # past the last column nothing is visible; past the last row nobody looks
        width = -(-cols // block_cols) * block_cols
        seen = np.pad(seen, ((0, 0), (0, width - cols)))
        visited, masked = [], []
        for first in range(0, rows, block_rows):
            tiles = np.split(seen[first : first + block_rows], width // block_cols, 1)
            some = [tile for tile in tiles if tile.any()]
            visited.append(len(some))
            masked.append(sum(not tile.all() for tile in some))
        found = tile_counts(rows, cols, block_rows, block_cols, band)
        assert found[0].tolist() == visited
        # a band narrower than a block leaves no tile whole, and may leave holes
        assert found[1].tolist() == masked


def test_transposed_band() -> None:
    assert transposed((None, 0)) == (0, None)
    assert transposed((-7, 3)) == (-3, 7)


def simulate(jobs, copies, slots) -> float:
    """Longest first, each on the slot that is free first."""
    ends = [0.0] * slots
    for job in sorted(np.repeat(jobs, copies), reverse=True):
        heapq.heappush(ends, heapq.heappop(ends) + job)
    return max(ends)


@pytest.mark.parametrize(
    ("jobs", "copies"), [([5.0], 7), ([5.0] * 3, 9), ([1.0, 2.0], 2), ([3.0, 9.0], 1)]
)
def test_makespan_of_few_or_equal_jobs(jobs, copies) -> None:
    assert makespan(np.array(jobs), copies, 4, tail=0.0) == simulate(jobs, copies, 4)


@pytest.mark.parametrize("copies", [8, 31, 100])
def test_makespan_of_unequal_jobs(copies) -> None:
    jobs = np.arange(1.0, 33.0)
    exact = simulate(jobs, copies, 132)
    assert makespan(jobs, copies, 132, tail=0.0) <= exact
    assert makespan(jobs, copies, 132, tail=1.0) >= exact


@by_name
def test_exactly_the_exposed_parts_add_up(family) -> None:
    for what in (problem(), problem(depth=64, causal=True), problem(batch=1, heads=1)):
        for config in family.candidates(what, H200):
            found = family.predict(what, config, H200)
            assert found.seconds == sum(term.exposed for term in found.terms)
            assert all(
                0 <= t.exposed <= t.busy * (1 + 1e-9) + 1e-12 for t in found.terms
            )


@by_name
def test_selected_in_time(family) -> None:
    selector = ConfigSelector(family, H200)
    lengths = itertools.count(4096)  # none is seen twice, so nothing is cached
    for depth, causal in itertools.product((64, 128), (False, True)):
        took = []
        for _ in range(3):  # the machine may be busy with something else
            what = problem(next(lengths), depth, causal=causal)
            started = time.perf_counter()
            selector.select(what)
            took.append(time.perf_counter() - started)
        assert min(took) < 0.05


@by_name
def test_not_faster_than_the_device(family) -> None:
    """No prediction beats the tensor cores or the memory."""
    products = {"attention-forward": 2, "attention-backward": 5}.get(family.name, 7)
    for length, depth, causal in itertools.product(
        (256, 4096, 16384), (64, 128), (False, True)
    ):
        what = problem(length, depth, causal=causal)
        scores = what.batch * what.heads * length**2 * (0.5 if causal else 1)
        flops = 2 * products * scores * depth
        assert seconds(family, what) > flops / H200.spec.matmul_flops["bfloat16"]
        rows = 2 * what.batch * what.heads * length * (depth + depth) * 2
        assert seconds(family, what) > rows / H200.spec.memory_bandwidth


@by_name
def test_parts_cost_what_they_should(family) -> None:
    plain = seconds(family, problem(8192))
    causal = seconds(family, problem(8192, causal=True))
    window = seconds(family, problem(8192, causal=True, window=(1023, None)))
    assert plain / 2 < causal < 0.62 * plain
    assert plain / 9 < window < plain / 4
    shape = (2, 16, 8192, 8192)
    bias = {"bias": shape, "bias_dtype": "float32"}
    for more in ({"softcap": 30.0}, {"segments": True}, bias, {"mask": shape}):
        assert seconds(family, problem(8192, **more)) > plain
    two = seconds(family, problem(8192, batch=4))
    assert 1.8 * plain < two < 2.2 * plain


def test_grouped_heads_read_keys_once() -> None:
    def traffic(kv_heads):
        what = problem(1024, heads=16, batch=8, kv_heads=kv_heads)
        found = FORWARD.predict(what, ForwardConfig(128, 2, 2), H200)
        return {term.name: term.busy for term in found.terms}

    many, few = traffic(16), traffic(2)
    assert few["HBM"] < 0.6 * many["HBM"]
    assert few["L2"] == many["L2"]


def test_known_forward_rates_are_met_within_a_fifth() -> None:
    """The best times that tokamax 0.0.17 stores for an H100, 16 K tokens, TFLOP/s."""
    published = {64: 521, 128: 666, 256: 727}
    for depth, rate in published.items():
        what = problem(16384, depth, 2048 // depth, 1)
        flops = 4 * 16384**2 * 2048
        found = flops / seconds(FORWARD, what, Target.parse("h100")) / 1e12
        assert found == pytest.approx(rate, rel=0.2), depth


LIMITS = [
    (FORWARD, ForwardConfig(128, 2, 2), 128, None),
    (FORWARD, ForwardConfig(192, 2, 2), 128, "shared memory"),
    (FORWARD, ForwardConfig(256, 2, 2, persistent=False), 64, "registers"),
    (FORWARD, ForwardConfig(64, 2, 2, persistent=False), 256, None),
    (FORWARD, ForwardConfig(64, 2, 2, persistent=True), 256, "shared memory"),
    (FORWARD, ForwardConfig(128, 2, 3, persistent=False), 128, "160 registers"),
    (FORWARD, ForwardConfig(96, 2, 2), 128, "multiple of 64"),
    (FORWARD, ForwardConfig(64, 2, 4), 128, "compute_warpgroups"),
    (BACKWARD, BackwardConfig(64, 2, 2), 128, None),
    (BACKWARD, BackwardConfig(128, 2, 2), 64, None),
    (BACKWARD, BackwardConfig(64, 2, 2), 64, "no whole tiles"),
    (BACKWARD, BackwardConfig(64, 2, 2), 256, "shared memory"),
]


@pytest.mark.parametrize(("family", "config", "depth", "reason"), LIMITS)
def test_limits(family, config, depth, reason) -> None:
    found = family.refuse(problem(depth=depth), config, H200)
    if reason is None:
        assert found is None
    else:
        assert reason in found


@by_name
@pytest.mark.parametrize(
    ("what", "device", "reason"),
    [
        (problem(), "a100", "Hopper"),
        (problem(), "v5e", "Hopper"),
        (problem(dtype="float32"), "h200", "float32"),
        (problem(depth=320), "h200", "head_dim 320"),
        (problem(value_dim=96), "h200", "value_dim 96"),
    ],
)
def test_what_no_configuration_can_run(family, what, device, reason) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        ConfigSelector(family, Target.parse(device)).select(what)


@by_name
@pytest.mark.parametrize("preset", gpu_presets.PRESETS)
def test_presets_have_candidates(family, preset) -> None:
    wide = family is not FORWARD and preset != "small"
    for what in gpu_presets.PRESETS[preset]():
        if family.candidates(what, H200):
            continue
        # the accumulators of dk and dv alone are 256 registers a thread
        assert wide
        assert what.head_dim + what.value_dim >= 320


def test_inputs_have_the_problems_shapes() -> None:
    what = AttentionProblem(
        2, 24, 40, 4, 2, 16, 8, "bfloat16", bias=(1, 4, 24, 40), bias_dtype="float32",
        mask=(2, 1, 1, 40), segments=True, q_lengths=True, k_lengths=True, sinks=True,
    )  # fmt: skip
    operands, lse, delta, dout = BACKWARD.make_inputs(what, 0)
    (same,) = FORWARD.make_inputs(what, 0)
    shapes = {name: (x.shape, x.dtype.name) for name, x in operands._asdict().items()}
    assert shapes == {
        "q": ((2, 24, 4, 16), "bfloat16"), "k": ((2, 40, 2, 16), "bfloat16"),
        "v": ((2, 40, 2, 8), "bfloat16"), "bias": ((1, 4, 24, 40), "float32"),
        "mask": ((2, 1, 1, 40), "bool"), "q_segments": ((2, 24), "int32"),
        "k_segments": ((2, 40), "int32"), "q_lengths": ((2,), "int32"),
        "k_lengths": ((2,), "int32"), "sinks": ((4,), "float32"),
    }  # fmt: skip
    assert (operands.q == same.q).all()
    assert dout.shape == (2, 24, 4, 8)
    assert lse.shape == delta.shape == (2, 4, 24)


def test_every_constant_has_a_source() -> None:
    assert all(value > 0 and len(source) > 10 for value, source in CONSTANTS.values())
    assert AT_MOST_ONE < set(CONSTANTS)
    assert gpu_family.CONSTANTS == default_constants()


def test_fit_finds_the_constants_that_made_the_times() -> None:
    """Times made with other constants, with 0.5% of noise, from a start far away."""
    free = ["tensor_efficiency", "score_operations", "tile_cycles", "cta_cycles"]
    start = default_constants()
    truth = {**start, "tensor_efficiency": 0.7, "score_operations": 6.5,
             "tile_cycles": 400.0, "cta_cycles": 9000.0}  # fmt: skip

    def predict(what, constants) -> float:
        return hopper_attention.forward_prediction(
            what[0], 128, what[1], 2, 2, H200, constants
        ).seconds

    noise = np.random.default_rng(0)
    samples = []
    for length, depth, block in itertools.product(
        (512, 1024, 4096), (64, 128, 256), (64, 96, 128)
    ):
        what = problem(length, depth), block
        samples.append((what, predict(what, truth) * math.exp(noise.normal() * 0.005)))
    limits = {name: (0.1, 1.0) for name in AT_MOST_ONE}
    found = fit(predict, samples, start, free, limits)
    assert found.error < 0.006
    assert found.worst < 0.02
    for name in free:
        assert found.constants[name] == pytest.approx(truth[name], rel=0.15), name
    kept = {n: v for n, v in found.constants.items() if n not in free}
    assert kept == {n: v for n, v in start.items() if n not in free}


def test_fit_refuses() -> None:
    with pytest.raises(ValueError, match="no samples"):
        fit(lambda what, constants: 1.0, [], {"a": 1.0}, ["a"])
    with pytest.raises(ValueError, match="'b'"):
        fit(lambda what, constants: 1.0, [(0, 1.0)], {"a": 1.0}, ["b"])


def test_missing_kernels_say_so() -> None:
    run = gpu_family._runner("gpu_no_such_file", "flash_forward")
    with pytest.raises(UnsupportedError, match="gpu_no_such_file"):
        run(problem(), ForwardConfig(128, 2, 2))
