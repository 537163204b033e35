"""Values for logging have the same bits on any number of ranks, and travel with the statistics of a step."""

import math
from typing import Any

import pytest

from samestep.launcher.launch import launch
from workers import step_values

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
