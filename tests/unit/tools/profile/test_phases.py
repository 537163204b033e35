"""A step is divided wholly, and what ranks say to each other in it is taken out of where it happens."""

import pytest

from profile_steps import step, summed
from samestep.tools.profile.phases import hidden_seconds, means, phase_seconds
from samestep.tools.profile.steps import Meeting, Step


def test_phases_are_the_whole_step() -> None:
    found = phase_seconds(step(("data", 1), ("forward", 2), ("backward", 3), ("communication", 4), ("optimizer", 5)))
    assert (found["data"], found["forward"], found["communication"]) == (1, 2, 4)
    assert sum(found.values()) == 15


def test_a_collective_within_forward_is_no_forward() -> None:
    logged = Meeting("all_reduce", "losses.py:7", False, 1.5, 2.5)
    found = phase_seconds(step(("data", 1), ("forward", 2), ("backward", 3), meetings=(logged,)))
    assert (found["forward"], found["communication"], sum(found.values())) == (1, 1, 6)


def test_what_is_beside_backward_is_hidden_and_the_rest_exposed() -> None:
    one = step(("forward", 1), ("backward", 2), ("communication", 1), meetings=(summed(2, 3.5), summed(3.5, 4)))
    assert phase_seconds(one)["communication"] == 1
    assert hidden_seconds(one) == pytest.approx(1)


def test_where_shards_are_computed_together_all_of_them_wait() -> None:
    found = phase_seconds(step(("computing", 4), meetings=(summed(1, 2), summed(1.5, 3))))
    assert (found["computing"], found["communication"]) == (2, 2)


def test_means_are_over_steps() -> None:
    assert means([step(("data", 1)), step(("data", 3))])["data"] == 2


def test_a_step_arrives_as_it_was_sent() -> None:
    sent = step(("data", 1), ("forward", 2), begin=3.25, meetings=(summed(3.5, 4),))
    assert Step.from_data(sent.as_data()) == sent
