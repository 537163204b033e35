"""Tests of the plan of a profile and of the number of messages of DDP."""

from pathlib import Path

import pytest

from samestep.config import RunOptions
from samestep.errors import InputError
from samestep.tools.profile.profile import Plan, parse_ranks
from samestep.tools.profile.trial import bucket_count

MEGABYTE = 2**20


def test_ranks_are_all_or_a_sorted_list() -> None:
    assert parse_ranks("all", 4) is None
    assert parse_ranks("2,0,2", 4) == (0, 2)


@pytest.mark.parametrize("text", ["", "0,", "-1", "first", "4", "0-2", "٣"])
def test_invalid_ranks_are_rejected(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_ranks(text, 4)
    assert error.value.code == "E_RANKS"


def test_steps_include_the_second_warmup() -> None:
    plan = Plan(wait=1, warmup=2, active=10, traced=3, ranks=(1,), folder=Path(), options=RunOptions())
    assert plan.steps == 1 + 2 + 10 + 2 + 3
    assert [plan.traces(rank) for rank in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    ("size", "buckets"), [(0, 1), (MEGABYTE, 1), (MEGABYTE + 4, 2), (26 * MEGABYTE, 2), (100 * MEGABYTE, 5)]
)
def test_first_bucket_is_small(size: int, buckets: int) -> None:
    assert bucket_count(size) == buckets
