"""Curves, whole and thinned."""

import math

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.tools.report.series import BUCKETS, Points, Series

VALUES = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=200)


def series_of(values: list[float]) -> Series:
    steps = numpy.arange(1, len(values) + 1)
    return Series(steps, steps * 0.5, numpy.array(values, float))


def same(times: numpy.ndarray) -> numpy.ndarray:
    return times


def test_of_a_step_that_is_there_twice_the_later_line_counts() -> None:
    points = Points()
    for step, time, value in [(1, 10, 1.0), (2, 11, 2.0), (3, 12, 3.0), (2, 20, 22.0), (3, 21, 33.0), (4, 22, 44.0)]:
        points.add(step, time, value)
    found = points.series(same)
    assert found.steps.tolist() == [1, 2, 3, 4]
    assert found.seconds.tolist() == [10, 20, 21, 22]
    assert found.values.tolist() == [1.0, 22.0, 33.0, 44.0]


@settings(max_examples=60)
@given(VALUES, st.integers(1, 20))
def test_thinned_curve_has_ends_and_extremes_of_every_stretch(values: list[float], buckets: int) -> None:
    found = series_of(values).thinned(buckets)
    there = [(number + 1, value) for number, value in enumerate(values) if math.isfinite(value)]
    kept = list(zip(found.steps.tolist(), found.values.tolist(), strict=True))
    assert set(kept) <= set(there)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert len(kept) <= max(2 * buckets + 2, len(there) if len(there) <= 2 * buckets else 0)
    if there:
        assert kept[0] == there[0]
        assert kept[-1] == there[-1]
        assert (min(kept, key=lambda p: p[1])[1], max(kept, key=lambda p: p[1])[1]) == (
            min(value for _, value in there),
            max(value for _, value in there),
        )


def test_one_spike_in_a_million_steps_is_kept() -> None:
    values = numpy.zeros(1_000_000)
    values[777_777], values[123_456] = 5.0, -3.0
    found = Series(numpy.arange(1_000_000), numpy.arange(1_000_000) * 0.1, values).thinned()
    assert len(found.steps) <= 2 * BUCKETS + 2
    assert {777_777: 5.0, 123_456: -3.0}.items() <= dict(zip(found.steps.tolist(), found.values, strict=True)).items()


def test_means_are_of_all_points_of_their_stretch() -> None:
    found = series_of([float(value) for value in range(100)] + [math.nan]).means(10)
    assert found.values.tolist() == [4.5 + 10 * number for number in range(10)]
    assert found.steps.tolist() == [6 + 10 * number for number in range(10)]
    assert not len(series_of([1.0, 2.0, 3.0]).means(10).steps)


def test_what_is_not_finite_is_told_apart() -> None:
    found = series_of([1.0, math.nan, 3.0, math.inf]).data()
    assert found["points"] == {"x": [1, 3], "t": [0.5, 1.5], "y": [1.0, 3.0]}
    assert found["holes"] == {"x": [2, 4], "t": [1.0, 2.0], "y": []}
    assert found["bad"] == 2
    assert series_of([math.nan] * 500).data()["bad"] == 500
    assert len(series_of([math.nan] * 500).holes().steps) == 50


def test_extremes_leave_out_what_is_not_finite() -> None:
    found = series_of([2.0, math.nan, 4.0, math.inf, 3.0]).extremes()
    assert found == {"least": 2.0, "largest": 4.0, "mean": 3.0, "median": 3.0, "last": 3.0}
    assert series_of([math.nan]).extremes() is None
