"""Clock of a device, with events on a timeline of the test in place of those of a GPU."""

import threading

import pytest

from samestep.distributed.device_clock import DeviceClock
from samestep.distributed.status import local_rank_status


class Timeline:
    """Time of a device in seconds, which a test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_over = True  # the device has reached all events
        self.events = 0

    def event(self) -> "Event":
        self.events += 1
        return Event(self)


class Event:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._at = 0.0

    def record(self) -> None:
        self._at = self._timeline.now

    def query(self) -> bool:
        return self._timeline.is_over

    def elapsed_time(self, end: "Event") -> float:
        return (end._at - self._at) * 1e3


def step(clock: DeviceClock, timeline: Timeline, own: float, others: float) -> float | None:
    """A step with two exchanges."""
    for _ in range(2):
        timeline.now += own / 2
        clock.begin_exchange()
        timeline.now += others / 2
        clock.end_exchange()
    return clock.end_step()


def test_own_work_of_some_steps_is_measured_without_exchanges() -> None:
    timeline = Timeline()
    clock = DeviceClock(timeline.event, steps=4)
    seconds = [step(clock, timeline, own=1.0 + number, others=10.0) for number in range(9)]
    # The steps 4 and 8 are measured; the first one has no event at its beginning.
    assert seconds == [None] * 4 + [5.0] * 4 + [9.0]
    assert timeline.events == 12  # of each: at its beginning, around both exchanges, at its end


def test_events_that_are_not_over_are_not_awaited() -> None:
    timeline = Timeline()
    clock = DeviceClock(timeline.event, steps=1)
    clock.end_step()
    timeline.is_over = False
    assert [step(clock, timeline, 1.0, 1.0) for _ in range(3)] == [None] * 3
    timeline.is_over = True
    assert clock.end_step() == 1.0
    assert step(clock, timeline, 2.0, 1.0) == 2.0


def test_exchanges_of_other_threads_are_left_out() -> None:
    timeline = Timeline()
    clock = DeviceClock(timeline.event, steps=1)
    clock.end_step()
    thread = threading.Thread(target=lambda: (clock.begin_exchange(), clock.end_exchange()))
    thread.start()
    thread.join()
    assert timeline.events == 1
    assert step(clock, timeline, 3.0, 1.0) == 3.0


def test_status_of_a_rank_has_the_time_of_its_device() -> None:
    timeline = Timeline()
    status = local_rank_status()
    status.device_clock = DeviceClock(timeline.event, steps=2)
    for number in range(1, 7):
        timeline.now += 100.0
        with status.waiting("a sum"):
            timeline.now += 50.0
        with pytest.raises(OSError, match="the link"), status.waiting("a sum"):
            raise OSError("the link is down")
        before = status.snapshot.compute_seconds
        status.end_step()
        if number > 2:
            assert status.snapshot.compute_seconds == before + 100.0
