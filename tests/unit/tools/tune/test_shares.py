"""Division of microbatches in proportion to speeds."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.tools.tune.shares import divide, step_seconds


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
