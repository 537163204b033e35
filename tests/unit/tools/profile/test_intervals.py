"""Stretches of time against a count of moments."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from samestep.tools.profile.intervals import Interval, length, overlap, union

stretches = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))


def moments(intervals: list[Interval]) -> set[int]:
    return {moment for begin, end in intervals for moment in range(int(begin), int(end))}


@given(stretches)
def test_union_is_the_same_time_in_order_without_overlaps(intervals: list[Interval]) -> None:
    found = union(intervals)
    assert moments(found) == moments(intervals)
    assert length(intervals) == len(moments(intervals)) == sum(end - begin for begin, end in found)
    assert all(before[1] < after[0] for before, after in pairwise(found))


@given(stretches, stretches)
def test_overlap_is_the_time_that_is_in_both(some: list[Interval], others: list[Interval]) -> None:
    assert moments(overlap(some, others)) == moments(some) & moments(others)
    assert length(overlap(some, others)) == len(moments(some) & moments(others))
