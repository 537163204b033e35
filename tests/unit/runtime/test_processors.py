"""How many processors there are to compute on."""

import os

import pytest

from samestep.runtime.processors import Processors, read_processors


def test_affinity_narrows_them() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(before)])
        assert read_processors().allowed == 1
    finally:
        os.sched_setaffinity(0, before)
    assert read_processors().allowed == len(before)


@pytest.mark.parametrize(("quota", "usable"), [(None, 8), (64.0, 8), (2.5, 2), (0.5, 1)])
def test_so_does_a_quota(quota: float | None, usable: int) -> None:
    assert Processors(online=16, allowed=8, quota=quota).usable == usable
