"""Configurations and problems as plain values, and the table of families."""

import dataclasses
import json

import pytest
from toy_family import TOY, ToyConfig, ToyProblem

from hlo_tools.errors import KernelConfigError, UnknownNameError
from hlo_tools.targets import Target
from pallas_kernels.families import FAMILIES, load_family
from pallas_kernels.kernel import Prediction, Term

CPU = Target.parse("cpu")


def test_config_round_trip() -> None:
    config = ToyConfig(8, unroll=2, fast=True)
    values = json.loads(json.dumps(config.to_dict()))
    assert ToyConfig.from_dict(values) == config
    assert ToyConfig.from_dict({"block": 8}) == ToyConfig(8)
    assert str(config) == "block=8, unroll=2, fast=True"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block": 8, "unrol": 2}, "did you mean unroll"),
        ({"unroll": 2}, "no value for block"),
        ({"block": "8"}, "block is '8', which is no int"),
        ({"block": True}, "block is True, which is no int"),
        ({"block": 8, "fast": 1}, "fast is 1, which is no bool"),
    ],
)
def test_config_from_wrong_values(values, message) -> None:
    with pytest.raises(KernelConfigError, match=message):
        ToyConfig.from_dict(values)


@pytest.mark.parametrize(
    "problem",
    [ToyProblem(3), ToyProblem(3, (1, 2)), ToyProblem(3, scale=0.1 + 0.2)],
)
def test_key_is_exact(problem) -> None:
    key = TOY.key(problem)
    assert TOY.problem_of(key) == problem
    assert hash(TOY.problem_of(key)) == hash(problem)  # tuples, not lists


def test_key_is_stable() -> None:
    """Stored tables depend on this spelling."""
    assert TOY.key(ToyProblem(3)) == '{"length":3}'
    assert TOY.key(ToyProblem(3, (1, 2), 0.5)) == (
        '{"length":3,"scale":0.5,"shape":[1,2]}'
    )
    assert TOY.key(ToyProblem(3, scale=1.0 + 2**-52)) != TOY.key(ToyProblem(3))


@pytest.mark.parametrize("key", ["", "[3]", "{}", '{"length":3,"width":2}', "3"])
def test_wrong_key(key) -> None:
    with pytest.raises(KernelConfigError, match="no ToyProblem"):
        TOY.problem_of(key)


def test_prediction_is_the_sum_of_what_is_exposed() -> None:
    found = Prediction((Term("a", 3.0, 1.0), Term("b", 2.0, 2.0)))
    assert found.seconds == 3.0
    assert found.bound_by == "b"


def test_candidates_and_reasons() -> None:
    refused = {}
    legal = TOY.candidates(ToyProblem(1), CPU, refused)
    assert legal == [ToyConfig(4), ToyConfig(8), ToyConfig(16)]
    assert refused[ToyConfig(32)] == "over 16 numbers do not fit"
    assert refused[ToyConfig(4, 2)] == "unrolled past the end"
    assert len(legal) + len(refused) == 8


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_whole(name: str) -> None:
    family = load_family(name)
    assert family.name == name
    assert dataclasses.is_dataclass(family.problem_class)
    assert (family.config_class.__doc__ or "").strip()
    assert family.presets
    for problems in family.presets.values():
        for problem in problems():
            assert family.problem_of(family.key(problem)) == problem


def test_unknown_family_names_the_closest() -> None:
    with pytest.raises(UnknownNameError, match="attention-forward"):
        load_family("attention-forwards")
