"""Division of microbatches in proportion to speeds, and the decision on new shares."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep
from samestep import StrategyConfig
from samestep.engine.share_balancer import ShareRule, divide, step_seconds
from samestep.errors import InputError


@pytest.mark.parametrize(
    ("microbatches", "speeds", "expected"),
    [
        (8, [1.0, 1.0], [4, 4]),
        (8, [2.0, 1.0], [5, 3]),
        (8, [3.0, 1.0], [6, 2]),
        (9, [1.0, 1.0, 1.0], [3, 3, 3]),
        (8, [100.0, 1.0, 100.0], [4, 1, 3]),
    ],
)
def test_division(microbatches: int, speeds: list[float], expected: list[int]) -> None:
    assert divide(microbatches, speeds) == expected


@settings(max_examples=40)
@given(st.integers(3, 7), st.lists(st.floats(0.1, 10), min_size=2, max_size=3))
def test_no_other_division_is_faster(microbatches: int, speeds: list[float]) -> None:
    counts = divide(microbatches, speeds)
    assert sum(counts) == microbatches
    assert min(counts) >= 1
    others = product(range(1, microbatches), repeat=len(speeds))
    best = min(step_seconds(other, speeds) for other in others if sum(other) == microbatches)
    assert step_seconds(counts, speeds) == pytest.approx(best)


def test_a_rank_that_stays_slow_gets_fewer_microbatches_in_the_second_decision() -> None:
    rule = ShareRule((4, 4))
    assert not rule.decide([0.01, 0.03])
    assert rule.counts == (4, 4)
    assert rule.decide([0.01, 0.03])
    assert rule.counts == (6, 2)
    assert rule.predicted == pytest.approx(2.0)
    assert [rule.decide([0.01, 0.03]) for _ in range(4)] == [False] * 4


def test_a_rank_that_was_slow_once_keeps_its_microbatches() -> None:
    rule = ShareRule((4, 4))
    for seconds in ([0.01, 0.03], [0.01, 0.011], [0.01, 0.03], [0.01, 0.01]):
        assert not rule.decide(seconds)


def test_small_gains_move_nothing() -> None:
    """Shares 9,7 shorten the step by 12.5 %, shares 5,3 by 16.7 %."""
    rule = ShareRule((8, 8))
    assert [rule.decide([0.0077, 0.01]) for _ in range(3)] == [False] * 3
    rule = ShareRule((4, 4))
    assert [rule.decide([0.01, 0.015]) for _ in range(2)] == [False, True]
    assert rule.counts == (5, 3)


def test_shares_return_when_the_rank_is_as_fast_as_the_others_again() -> None:
    rule = ShareRule((3, 3, 2))
    for seconds in ([0.01, 0.01, 0.05], [0.01, 0.01, 0.05], [0.01, 0.01, 0.01]):
        rule.decide(seconds)
    assert rule.counts == (4, 3, 1)
    assert rule.decide([0.01, 0.01, 0.01])
    assert rule.counts == (3, 3, 2)


def test_custom_loops_have_fixed_shares() -> None:
    with pytest.raises(InputError) as caught, samestep.start(strategy=StrategyConfig(shares="auto")):
        pass
    assert caught.value.code == "E_SHARES"
