"""Sums in tree order over several ranks have the bits of one process, by sockets and by collectives of gloo."""

import pytest

from helpers.forked_ranks import Job, run_jobs
from workers.tree_sums import compare

MODULE = compare.__module__


def jobs(ranks: int) -> list[Job]:
    microbatches = sorted({ranks, 8, 13})
    return [
        Job("compare", ranks, {"microbatches": microbatches, "uses_sockets": uses_sockets})
        for uses_sockets in (True, False)
    ]


def test_four_ranks_have_the_bits_of_one_process() -> None:
    assert run_jobs(MODULE, *jobs(4)) == [[], []]


@pytest.mark.slow
def test_any_number_of_ranks_has_the_bits_of_one_process() -> None:
    others = [job for ranks in (1, 2, 3, 5, 6, 7, 8) for job in jobs(ranks)]
    assert run_jobs(MODULE, *others) == [[]] * len(others)
