"""The time of a run without its pauses."""

import numpy

from samestep.tools.report.clock import Clock


def test_time_begins_with_the_first_sign_of_life() -> None:
    clock = Clock(numpy.array([103.0, 100.0, 110.0]), [])
    assert (clock.at(100.0), clock.at(103.0), clock.total) == (0.0, 3.0, 10.0)
    assert clock.at(90.0) == 0.0


def test_pause_before_a_run_is_resumed_does_not_count() -> None:
    # Heard last at 105, alive again at 1000, and it says so at 1002.
    clock = Clock(numpy.array([100.0, 105.0, 1000.0, 1002.0, 1010.0]), [(105.0, 1002.0)])
    assert [clock.at(time) for time in (105.0, 1000.0, 1002.0, 1010.0)] == [5.0, 5.0, 7.0, 15.0]
    assert clock.total == 15.0


def test_long_evaluation_is_no_pause() -> None:
    clock = Clock(numpy.array([100.0, 700.0, 1000.0, 1001.0]), [(700.0, 1000.0)])
    assert clock.at(700.0) == 600.0
    assert clock.total == 601.0


def test_several_pauses_add_up() -> None:
    clock = Clock(numpy.array([0.0, 10.0, 110.0, 120.0, 320.0, 330.0]), [(120.0, 320.0), (10.0, 110.0)])
    assert clock(numpy.array([10.0, 110.0, 120.0, 320.0, 330.0])).tolist() == [10.0, 10.0, 20.0, 20.0, 30.0]


def test_nothing_took_no_time() -> None:
    assert Clock(numpy.array([]), []).total == 0.0
