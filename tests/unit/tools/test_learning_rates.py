"""Learning rates of `samestep bench --lr`: growing rates, moving averages and the suggestion."""

import math

import pytest

from samestep.tools.learning_rates import FIRST_RATE, LAST_RATE, has_diverged, lines_of, rates, smoothed, suggestion


def test_rates_grow_by_one_factor() -> None:
    found = rates(8)
    assert (found[0], found[-1]) == (FIRST_RATE, pytest.approx(LAST_RATE))
    assert found[3] / found[2] == pytest.approx(10)
    assert rates(1) == [FIRST_RATE]


def test_average_has_no_bias_to_its_start() -> None:
    assert smoothed([2.0] * 5) == pytest.approx([2.0] * 5)
    assert smoothed([1.0, 3.0])[-1] == pytest.approx((0.9 * 0.1 * 1 + 0.1 * 3) / (1 - 0.9**2))


def test_suggestion_is_the_steepest_fall_before_the_minimum() -> None:
    assert suggestion([1e-3, 1e-2, 1e-1, 1.0, 10.0], [2.0, 1.9, 1.0, 0.8, 9.0]) == 1e-2
    assert suggestion([1e-3, 1e-2], [1.0, 2.0]) is None


@pytest.mark.parametrize(("last", "expected"), [(1.0, False), (100.0, True), (math.inf, True), (math.nan, True)])
def test_divergence(last: float, expected: bool) -> None:
    assert has_diverged([1.0, 1.0, last]) is expected
    assert not has_diverged([-1.0, -2.0, -1.5])  # such a loss has its smallest value below 0


def test_lines_have_a_bar_for_each_shown_loss() -> None:
    data = {"rates": [0.1, 1.0, 2.0], "losses": [2.0, 1.5, 1.0], "lr": 0.1}
    assert [line.count("█") for line in lines_of(data)[1:4]] == [40, 20, 0]
    assert "lr=0.1:" in lines_of(data)[-1]
    assert "no suggestion" in lines_of({**data, "lr": None})[-1]
