"""Values for logging have the same bits on any number of ranks, and travel with the statistics of a step."""

import math
from typing import Any

import pytest
import torch

import samestep
from samestep.engine import step_values as module
from samestep.engine.step_stats import LocalStats, StepStats
from samestep.engine.step_values import StepValues
from samestep.launcher.launch import launch
from samestep.strategies.reduction import MicrobatchTree
from workers import step_values

World = samestep.World
RANKS = [1, 3, 4]


@pytest.fixture(scope="module")
def results() -> dict[int, Any]:
    return {ranks: launch(step_values.run_on_all, processes=ranks) for ranks in RANKS}


@pytest.mark.parametrize("case", step_values.CASES)
def test_values_have_the_same_bits_on_any_number_of_ranks(results: dict[int, Any], case: str) -> None:
    (first, _), *others = (results[ranks][rank][case] for ranks in RANKS for rank in range(ranks))
    assert all(values == first for values, _ in others)


@pytest.mark.parametrize("case", step_values.CASES)
def test_values_with_known_names_need_no_further_message(results: dict[int, Any], case: str) -> None:
    _, expected = step_values.CASES[case]
    assert [results[ranks][rank][case][1] for ranks in RANKS for rank in range(ranks)] == [expected] * sum(RANKS)


def test_values_are_means_over_the_samples_that_have_them(results: dict[int, Any]) -> None:
    cases = {case: values for case, (values, _) in results[4][3].items()}
    assert all(names == {} for names in cases["none"])
    assert [sorted(names) for names in cases["equal names"]] == [["a", "b", "least"]] * 4
    assert {(float.fromhex(names["a"]), names["least"]) for names in cases["equal names"]} == {(2.5, (0.0).hex())}
    assert all(math.isnan(float.fromhex(names["a"])) for names in cases["not finite"])
    assert all(float.fromhex(names["b"]) == -math.inf for names in cases["not finite"])
    assert [list(names) for names in cases["another name"]] == [["a"], ["a"], ["b"], ["b"]]
    assert [list(names) for names in cases["none later"]] == [["a"], ["a"], [], []]
    assert [float.fromhex(names["a"]) for names in cases["one microbatch"]] == [1.0] * 4
    means = [float.fromhex(names["b"]) for names in cases["equal names"]]
    assert [2 * float.fromhex(names["a"]) for names in cases["a sum and a count"]] == pytest.approx(means)


def test_a_microbatch_without_usable_samples_adds_no_values() -> None:
    expected, *_ = launch(step_values.with_unusable_microbatch, processes=1)
    for values in expected:
        assert values["same"] == values["loss"]
        assert values["mean"] == pytest.approx(values["loss"])
    assert launch(step_values.with_unusable_microbatch, processes=3) == 3 * [expected]


def test_numbers_on_a_device_may_have_different_types(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "value_on_host", lambda tensor: None)  # as for a GPU
    tree, values = MicrobatchTree(2, 2), StepValues()
    for is_planned in (False, True):
        values.begin_step([0, 1])
        for number in range(2):
            values.add(
                number, ("value", "a"), torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(2**24 + number + 1)
            )
        assert values.is_planned == is_planned
        (vector,) = LocalStats().vectors(tree, ((0, 2),), alone.device, values=values).values()
        stats = StepStats.from_vector(2, vector, values_length=values.length(2))
        assert stats.are_values_planned == is_planned
        values.read(stats.values, [0, 1], alone, is_planned=is_planned)
        assert [row[2:] for row in values.rows] == [(0.5, 2**24 + 1), (0.5, 2**24 + 2)]
