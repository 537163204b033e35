"""Who is the odd one out, where that can be told."""

import pytest

from samestep.runtime.majority import odd_ranks, ranks_text


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
def test_odd_are_those_beside_more_than_half(values: str, odd: list[int]) -> None:
    assert odd_ranks(dict(enumerate(values))) == odd


def test_ranks_are_told_as_people_do() -> None:
    assert ranks_text([2]) == "rank 2"
    assert ranks_text([0, 3]) == "ranks 0 and 3"
    assert ranks_text([0, 1, 3]) == "ranks 0, 1 and 3"
