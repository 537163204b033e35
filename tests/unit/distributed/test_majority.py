"""Ranks that differ from the majority."""

import pytest

from samestep.distributed.majority import odd_ranks


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ("aaaa", []),
        ("aaba", [2]),
        ("baaa", [0]),
        ("abcaa", [1, 2]),
        ("ab", []),
        ("aabb", []),
        ("aabc", []),
        ("abc", []),
    ],
)
def test_odd_ranks_differ_from_a_strict_majority(values: str, odd: list[int]) -> None:
    assert odd_ranks(dict(enumerate(values))) == odd
