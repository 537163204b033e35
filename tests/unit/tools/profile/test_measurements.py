"""Tests of interval arithmetic and of the phases of a step."""

import json
from dataclasses import astuple
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.profile_steps import all_reduce, make_step, measured
from samestep.tools.profile.measurements import Collective, Interval, Step, length, overlap, union

interval_lists = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))


def units(intervals: list[Interval]) -> set[int]:
    return {unit for begin, end in intervals for unit in range(int(begin), int(end))}


@given(interval_lists)
def test_union_is_disjoint_and_ordered(intervals: list[Interval]) -> None:
    result = union(intervals)
    assert units(result) == units(intervals)
    assert length(intervals) == len(units(intervals)) == sum(end - begin for begin, end in result)
    assert all(before[1] < after[0] for before, after in pairwise(result))


@given(interval_lists, interval_lists)
def test_overlap_is_the_intersection(some: list[Interval], others: list[Interval]) -> None:
    result = overlap(some, others)
    assert units(result) == units(some) & units(others)
    assert length(result) == len(units(some) & units(others))
    assert all(before[1] <= after[0] for before, after in pairwise(result))


def test_phases_add_up_to_the_step() -> None:
    step = make_step(("data", 1), ("forward", 2), ("backward", 3), ("communication", 4), ("optimizer", 5))
    assert (step.phases["data"], step.phases["forward"], step.phases["communication"]) == (1, 2, 4)
    assert sum(step.phases.values()) == step.seconds == 15


def test_collective_within_forward_is_not_forward() -> None:
    logged = Collective("all_reduce", "losses.py:7", False, 1.5, 2.5)
    phases = make_step(("data", 1), ("forward", 2), ("backward", 3), collectives=(logged,)).phases
    assert (phases["forward"], phases["communication"], sum(phases.values())) == (1, 1, 6)


def test_communication_during_backward_is_hidden_and_the_rest_exposed() -> None:
    collectives = (all_reduce(2, 3.5), all_reduce(3.5, 4))
    step = make_step(("forward", 1), ("backward", 2), ("communication", 1), collectives=collectives)
    assert step.phases["communication"] == 1
    assert step.hidden_seconds == pytest.approx(1)


def test_concurrent_microbatches_all_wait_for_a_collective() -> None:
    step = make_step(("computing", 4), collectives=(all_reduce(1, 2), all_reduce(1.5, 3)))
    assert (step.phases["computing"], step.phases["communication"]) == (2, 2)


def test_phases_of_a_rank_are_means_over_steps() -> None:
    assert measured([make_step(("data", 1)), make_step(("data", 3))]).phases[0]["data"] == 2


def test_step_survives_a_round_trip() -> None:
    step = make_step(("data", 1), ("forward", 2), begin=3.25, collectives=(all_reduce(3.5, 4),))
    assert Step.of(*json.loads(json.dumps(astuple(step)))) == step
