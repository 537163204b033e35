"""Charts of the page: reduction of long curves, axes, and values that are not finite."""

import numpy
import pytest

from samestep.tools.report import Chart, Series, draw, reduced, ticks


def series(values: list[float] | numpy.ndarray) -> Series:
    return Series(0, "a", numpy.arange(1, len(values) + 1, dtype=float), numpy.asarray(values, dtype=float))


def test_spikes_of_a_long_curve_remain() -> None:
    curve = series(numpy.sin(numpy.arange(100_000)))
    curve.values[77_777] = 9.0
    (kind, (steps, values)), (_, (_, means)) = reduced(curve.steps, curve.values)
    assert kind == "range"
    assert len(steps) <= 800
    assert steps[values.argmax()] == 77_778
    assert abs(means).max() < 0.1
    assert (numpy.diff(steps) > 0).all()


def test_points_are_inside_the_plot() -> None:
    drawn = draw(Chart("a", "loss", [series([3.0, float("nan"), 1.0]), series([2.0])]))
    (_, kind, points), (_, _, single) = drawn["lines"]
    # A single point is a line of two equal ones, which browsers draw as a dot.
    assert (kind, len(points.split()), len(single.split()), len(set(single.split()))) == ("line", 2, 2, 1)
    for point in points.split():
        x, y = map(float, point.split(","))
        assert 66 <= x <= 630
        assert 10 <= y <= 190
    assert [row[2:] for row in drawn["rows"]] == [(["1", "1", "3"], 1), (["2", "2", "2"], 0)]


def test_ticks_are_round() -> None:
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(ticks(-0.936, -0.264)) <= -0.264
    assert ticks(13.0, 987.0) == [200.0, 400.0, 600.0, 800.0]
