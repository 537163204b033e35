"""Ranks find each other in a store that others have written to."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from samestep.errors import RunError
from samestep.runtime.roll_in import job_prefix, roll_in

LONG, SHORT = timedelta(seconds=20), timedelta(seconds=0.3)
Comers = list[Callable[[], tuple[dist.Store, int]]]


def comer(
    store: dist.Store, rank: int, size: int, *, restarts: int = 0, timeout: timedelta = LONG
) -> Callable[[], tuple[dist.Store, int]]:
    return lambda: roll_in(store, rank=rank, size=size, restarts=restarts, timeout=timeout, hint="look")


def all_at_once(comers: Comers) -> list[Future[tuple[dist.Store, int]]]:
    with ThreadPoolExecutor(len(comers)) as pool:
        return [pool.submit(each) for each in comers]


def test_one_alone() -> None:
    _, restarts = comer(dist.HashStore(), 0, 1, restarts=2)()
    assert restarts == 2


def test_all_see_the_same_part_and_the_largest_count() -> None:
    store = dist.HashStore()
    found = [each.result() for each in all_at_once([comer(store, r, 4, restarts=r % 3) for r in range(4)])]
    found[0][0].set("word", "here")
    assert [part.get("word") for part, _ in found] == [b"here"] * 4
    assert [count for _, count in found] == [2] * 4


def test_a_second_attempt_does_not_see_the_first() -> None:
    store = dist.HashStore()
    first = [each.result()[0] for each in all_at_once([comer(store, r, 3) for r in range(3)])]
    first[0].set("word", "old")
    second = [each.result()[0] for each in all_at_once([comer(store, r, 3) for r in range(3)])]
    assert not any(part.check(["word"]) for part in second)


def test_what_a_rank_of_an_earlier_attempt_left_does_not_count() -> None:
    store = dist.HashStore()
    with pytest.raises(RunError, match="waited"):
        comer(store, 1, 2, timeout=SHORT)()  # it said hello, and is gone
    with pytest.raises(RunError, match=r"rank 1 of 2 did not come within 0.3 s"):
        comer(store, 0, 2, timeout=SHORT)()
    assert [each.result()[1] for each in all_at_once([comer(store, r, 2) for r in range(2)])] == [0, 0]


def test_who_did_not_come_is_named() -> None:
    store = dist.HashStore()
    here = [comer(store, rank, 4, timeout=SHORT) for rank in (0, 2)]
    rank_0, rank_2 = all_at_once(here)
    with pytest.raises(RunError, match="ranks 1 and 3 of 4 did not come") as caught:
        rank_0.result()
    assert "do:   look" in str(caught.value)
    with pytest.raises(RunError, match="rank 2 of 4 waited"):
        rank_2.result()


def test_another_token_or_number_of_ranks_is_not_seen() -> None:
    store = dist.HashStore()
    ours, theirs = (dist.PrefixStore(job_prefix(token), store) for token in ("ours", "theirs"))
    comers = [comer(ours, 0, 2), comer(ours, 1, 2)]
    strangers = [comer(theirs, 1, 2, timeout=SHORT), comer(ours, 1, 3, timeout=SHORT)]
    first, second, *others = all_at_once([*comers, *strangers])
    assert first.result()[1] == second.result()[1] == 0
    for other in others:
        with pytest.raises(RunError, match="rank 1 of"):
            other.result()


def test_the_token_itself_is_not_in_the_store() -> None:
    assert "secret" not in job_prefix("secret")
    assert len({job_prefix("secret"), job_prefix("another"), job_prefix(None), job_prefix("no-token")}) == 4
