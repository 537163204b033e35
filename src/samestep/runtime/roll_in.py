"""How ranks find each other in a store that strangers and earlier attempts may have written to.

Rank 0 makes a new name for this attempt. Every other rank puts a word of its own into the store until rank 0 answers
it with that name, and says under the name that it is here. What an earlier attempt left behind is answered too, but
nobody is there to hear it. All this stands under a prefix made of the job's token and its number of ranks, so what has
another of either is not seen at all.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from samestep.errors import RunError
from samestep.runtime.majority import ranks_text

_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.1


def job_prefix(token: str | None) -> str:
    """Under which all keys of a job stand."""
    return "samestep/" + (hashlib.sha256(token.encode()).hexdigest() if token is not None else "no-token")


def roll_in(
    store: dist.Store, *, rank: int, size: int, restarts: int, timeout: timedelta, hint: str
) -> tuple[dist.Store, int]:
    """Wait until all ranks are here.

    Args:
        store: the job's.
        restarts: how often this rank's launcher says it started the job anew.
        hint: what to look at where ranks do not come.

    Returns:
        The part of the store that is this attempt's alone, and the largest number of restarts that a rank gave.

    Raises:
        RunError: ranks did not come in time, or two processes are the same rank.
    """
    meeting = dist.PrefixStore(str(size), store)
    if rank == 0:
        return _gather(meeting, size, restarts, timeout, hint)
    word = uuid4().hex
    meeting.set(f"hello/{rank}", f"{word} {restarts}")
    _wait(lambda: meeting.check([f"welcome/{word}"]), timeout, lambda: _absent(rank, size, timeout, hint))
    attempt = dist.PrefixStore(meeting.get(f"welcome/{word}").decode(), meeting)
    if attempt.add(f"here/{rank}", 1) > 1:
        raise RunError(
            f"two processes say that they are rank {rank} of {size}",
            rule="every process of a job is another rank",
            do=hint,
        )
    _wait(lambda: attempt.check(["begin"]), timeout, lambda: _absent(rank, size, timeout, hint))
    return attempt, int(attempt.get("begin"))


def _gather(meeting: dist.Store, size: int, restarts: int, timeout: timedelta, hint: str) -> tuple[dist.Store, int]:
    name = uuid4().hex
    attempt = dist.PrefixStore(name, meeting)
    missing = set(range(1, size))
    words: dict[int, str] = {}
    counts = {0: restarts}

    def all_are_here() -> bool:
        for rank in sorted(missing):
            if meeting.check([f"hello/{rank}"]):
                word, count = meeting.get(f"hello/{rank}").decode().split()
                if words.get(rank) != word:
                    words[rank], counts[rank] = word, int(count)
                    meeting.set(f"welcome/{word}", name)
            if attempt.check([f"here/{rank}"]):
                missing.remove(rank)
        return not missing

    _wait(all_are_here, timeout, lambda: _missing(sorted(missing), size, timeout, hint))
    attempt.set("begin", str(max(counts.values())))
    return attempt, max(counts.values())


def _wait(holds: Callable[[], bool], timeout: timedelta, error: Callable[[], RunError]) -> None:
    # Not a blocking read: no signal would be heard, and torch writes warnings when one ends without an answer.
    began, limit = time.monotonic(), timeout.total_seconds()
    while not holds():
        waited = time.monotonic() - began
        if waited > limit:
            raise error()
        time.sleep(min(max(waited / 8, _SHORTEST_NAP), _LONGEST_NAP))


def _missing(ranks: list[int], size: int, timeout: timedelta, hint: str) -> RunError:
    return RunError(
        f"{ranks_text(ranks)} of {size} did not come within {timeout.total_seconds():g} s",
        rule="every rank of a job comes to the store of rank 0, with the same SAMESTEP_TOKEN and number of ranks",
        do=hint,
    )


def _absent(rank: int, size: int, timeout: timedelta, hint: str) -> RunError:
    return RunError(
        f"rank {rank} of {size} waited {timeout.total_seconds():g} s for rank 0 to count it in",
        rule="every rank of a job comes to the store of rank 0, with the same SAMESTEP_TOKEN and number of ranks",
        do=hint,
    )
