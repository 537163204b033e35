"""Curves and their reduction, and time without pauses."""

import math

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.tools.report.curves import BUCKETS, Points, RunClock, Series

VALUES = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=200)


def identity(times: numpy.ndarray) -> numpy.ndarray:
    return times


def series_of(values: list[float]) -> Series:
    steps = numpy.arange(1, len(values) + 1)
    return Series(steps, steps * 0.5, numpy.array(values, float))


def test_later_point_of_a_repeated_step_replaces_the_first() -> None:
    points = Points()
    for step, time, value in [(1, 10, 1.0), (2, 11, 2.0), (3, 12, 3.0), (2, 20, 22.0), (3, 21, 33.0), (4, 22, 44.0)]:
        points.add(step, time, value)
    series = points.series(identity)
    assert series.steps.tolist() == [1, 2, 3, 4]
    assert series.seconds.tolist() == [10, 20, 21, 22]
    assert series.values.tolist() == [1.0, 22.0, 33.0, 44.0]


@settings(max_examples=60)
@given(VALUES, st.integers(1, 20))
def test_thinned_curve_has_ends_and_extremes_of_each_bucket(values: list[float], buckets: int) -> None:
    series = series_of(values).thinned(buckets)
    finite = [(number + 1, value) for number, value in enumerate(values) if math.isfinite(value)]
    thinned = list(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    assert set(thinned) <= set(finite)
    assert thinned == sorted(thinned, key=lambda point: point[0])
    assert len(thinned) <= max(2 * buckets + 2, len(finite) if len(finite) <= 2 * buckets else 0)
    if finite:
        assert thinned[0] == finite[0]
        assert thinned[-1] == finite[-1]
        assert (min(thinned, key=lambda p: p[1])[1], max(thinned, key=lambda p: p[1])[1]) == (
            min(value for _, value in finite),
            max(value for _, value in finite),
        )


def test_spike_in_a_million_steps_is_not_lost() -> None:
    values = numpy.zeros(1_000_000)
    values[777_777], values[123_456] = 5.0, -3.0
    series = Series(numpy.arange(1_000_000), numpy.arange(1_000_000) * 0.1, values).thinned()
    assert len(series.steps) <= 2 * BUCKETS + 2
    assert {777_777: 5.0, 123_456: -3.0}.items() <= dict(zip(series.steps.tolist(), series.values, strict=True)).items()


def test_means_include_all_points_of_their_bucket() -> None:
    series = series_of([float(value) for value in range(100)] + [math.nan]).means(10)
    assert series.values.tolist() == [4.5 + 10 * number for number in range(10)]
    assert series.steps.tolist() == [6 + 10 * number for number in range(10)]
    assert not len(series_of([1.0, 2.0, 3.0]).means(10).steps)


def test_nonfinite_values_are_separate() -> None:
    data = series_of([1.0, math.nan, 3.0, math.inf]).data()
    assert data["points"] == {"x": [1, 3], "t": [0.5, 1.5], "y": [1.0, 3.0]}
    assert data["nonfinite"] == {"x": [2, 4], "t": [1.0, 2.0], "y": []}
    assert data["nonfinite_count"] == 2
    assert series_of([math.nan] * 500).data()["nonfinite_count"] == 500
    assert len(series_of([math.nan] * 500).data()["nonfinite"]["x"]) == 50


def test_statistics_exclude_nonfinite_values() -> None:
    statistics = series_of([2.0, math.nan, 4.0, math.inf, 3.0]).statistics()
    assert statistics == {"min": 2.0, "max": 4.0, "mean": 3.0, "median": 3.0, "last": 3.0}
    assert series_of([math.nan]).statistics() is None


def test_time_starts_at_the_first_activity() -> None:
    clock = RunClock(numpy.array([103.0, 100.0, 110.0]), [])
    assert (clock.at(100.0), clock.at(103.0), clock.total) == (0.0, 3.0, 10.0)
    assert clock.at(90.0) == 0.0


def test_pause_before_a_resume_does_not_count() -> None:
    # Last event at 105, next activity at 1000, event of the resume at 1002.
    clock = RunClock(numpy.array([100.0, 105.0, 1000.0, 1002.0, 1010.0]), [(105.0, 1002.0)])
    assert [clock.at(time) for time in (105.0, 1000.0, 1002.0, 1010.0)] == [5.0, 5.0, 7.0, 15.0]
    assert clock.total == 15.0


def test_long_evaluation_is_not_a_pause() -> None:
    clock = RunClock(numpy.array([100.0, 700.0, 1000.0, 1001.0]), [(700.0, 1000.0)])
    assert clock.at(700.0) == 600.0
    assert clock.total == 601.0


def test_several_pauses() -> None:
    clock = RunClock(numpy.array([0.0, 10.0, 110.0, 120.0, 320.0, 330.0]), [(120.0, 320.0), (10.0, 110.0)])
    assert clock(numpy.array([10.0, 110.0, 120.0, 320.0, 330.0])).tolist() == [10.0, 10.0, 20.0, 20.0, 30.0]


def test_no_activity_has_no_duration() -> None:
    assert RunClock(numpy.array([]), []).total == 0.0
