"""Which ranks `--ranks` names, and how many steps are trained."""

from pathlib import Path

import pytest

from samestep.config import RunOptions
from samestep.errors import InputError
from samestep.tools.profile.plan import Plan, ranks_of


def test_ranks_are_all_or_some_in_order() -> None:
    assert ranks_of("all", 4) is None
    assert ranks_of("2,0,2", 4) == (0, 2)


@pytest.mark.parametrize("text", ["", "0,", "-1", "first", "4", "0-2", "٣"])
def test_other_ranks_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        ranks_of(text, 4)


def test_steps_are_counted_with_the_second_warmup() -> None:
    plan = Plan(wait=1, warmup=2, active=10, traced=3, ranks=(1,), folder=Path(), options=RunOptions())
    assert plan.steps == 1 + 2 + 10 + 2 + 3
    assert [plan.looks_at(rank) for rank in range(3)] == [False, True, False]
