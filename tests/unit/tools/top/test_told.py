"""What the events of a run tell, however many are read at once."""

import json
from typing import Any

import pytest

from samestep.tools.top.told import Told

EVALUATION = {
    "event": "evaluation",
    "step": 4,
    "epoch": 1,
    "epochs": 3,
    "train_loss": 2.0,
    "is_best": True,
    "loss": 1.5,
}


def line(event: dict[str, Any], time: float = 1000.0) -> bytes:
    return json.dumps({"time": time, **event}).encode()


def step(number: int, time: float) -> bytes:
    facts = {"epoch": (number - 1) // 200, "step_in_epoch": (number - 1) % 200 + 1, "steps_in_epoch": 200}
    return line({"event": "step", "step": number, **facts, "loss": 1 / number}, time)


def told(*lines: bytes) -> Told:
    found = Told()
    found.hear(lines)
    return found


def test_nothing_is_told_of_nothing() -> None:
    found = told()
    assert (found.last_step, found.values, found.ended_as, found.seconds_a_step()) == ({}, {}, None, None)


@pytest.mark.parametrize("at_once", [1, 2, 7, 64, 1000])
def test_the_last_step_and_the_speed_are_known_however_they_are_read(at_once: int) -> None:
    found = Told()
    lines = [step(number, 1000 + number / 4) for number in range(1, 300)]
    for begin in range(0, len(lines), at_once):
        found.hear(lines[begin : begin + at_once])
    assert found.last_step["step"] == 299
    assert found.seconds_a_step() == pytest.approx(0.25, rel=0.05)


def test_a_pause_counts_and_what_was_long_ago_does_not() -> None:
    fast = [step(number, 1000 + number / 100) for number in range(1, 65)]
    slow = [step(number, 2000 + 5.0 * number) for number in range(65, 300)]
    found = Told()
    for each in fast + slow:
        found.hear([each])
    assert found.seconds_a_step() == pytest.approx(5.0, rel=0.05)


def test_steps_that_do_not_come_make_it_slower() -> None:
    found = told(step(1, 1000.0), step(2, 1001.0), step(64, 1002.0), step(65, 1003.0))
    assert found.seconds_a_step(until=1002.5) == found.seconds_a_step() == pytest.approx(3 / 64)
    assert found.seconds_a_step(until=1064.0) == 1.0


def test_an_end_ends_it_until_it_goes_on() -> None:
    steps = [step(number, 1000.0 + number) for number in range(1, 4)]
    assert told(*steps, line({"event": "end", "stopped": False})).ended_as == "ended"
    found = told(*steps, line({"event": "end", "stopped": True}))
    assert found.ended_as == "stopped"
    found.hear([line({"event": "resume", "step": 3})])
    assert (found.ended_as, found.seconds_a_step()) == (None, None)
    found.hear([step(4, 2000.0), step(5, 2001.0)])
    assert found.seconds_a_step() == pytest.approx(1.0)


def test_steps_that_are_made_again_are_no_speed() -> None:
    found = Told()
    for each in [step(3, 1003.0), step(4, 1004.0), step(1, 1100.0), step(2, 1103.0)]:
        found.hear([each])
    assert (found.last_step["step"], found.seconds_a_step()) == (2, 3.0)


def test_an_evaluation_has_its_values() -> None:
    found = told(step(4, 1000.0), line({**EVALUATION, "accuracy": 0.5, "samples_per_second": 9.0}))
    assert found.values == {"epoch": 1, "loss": 1.5, "accuracy": 0.5}


def test_a_line_that_was_cut_is_passed_over() -> None:
    cut = step(2, 1001.0)[:30]
    found = told(step(1, 1000.0), cut + step(2, 1001.0), step(3, 1002.0), cut)
    assert (found.last_step["step"], found.unreadable) == (3, 1)
