"""Rendezvous: the ranks of a job find each other in its store.

A store may hold keys of other jobs and of earlier attempts. Rank 0 generates a new name for the
attempt. Every other rank posts a nonce of its own until rank 0 answers the nonce with that name;
the rank then confirms under the name. All keys have a prefix of the job's token and number of
ranks, so a job with another token or size is invisible.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from samestep.distributed.status import ranks_text
from samestep.errors import RunError

_MIN_POLL_SECONDS = 0.0005
_MAX_POLL_SECONDS = 0.1


def wait_for_ranks(
    store: dist.Store, *, rank: int, size: int, restarts: int, timeout: timedelta, hint: str
) -> tuple[dist.Store, int]:
    """Wait until all ranks have joined, each with its number of restarts according to its launcher.

    Returns:
        The part of the store that belongs to this attempt alone, and the largest number of restarts
        of any rank.

    Raises:
        RunError: a rank is missing after `timeout`, or two processes have the same rank.
    """
    store = dist.PrefixStore(str(size), store)
    if rank == 0:
        return _admit_ranks(store, size, restarts, timeout, hint)
    nonce = uuid4().hex
    store.set(f"hello/{rank}", f"{nonce} {restarts}")

    def wait(store: dist.Store, key: str) -> str:
        _poll(
            lambda: store.check([key]),
            lambda: f"rank {rank} of {size} received no answer from rank 0",
            timeout,
            hint,
        )
        return store.get(key).decode()

    attempt = dist.PrefixStore(wait(store, f"welcome/{nonce}"), store)
    if attempt.add(f"here/{rank}", 1) > 1:
        raise RunError(
            f"two processes are rank {rank} of {size}",
            expected="every process of a job has its own rank",
            fix=hint,
            code="E_RENDEZVOUS",
        )
    return attempt, int(wait(attempt, "begin"))


def _admit_ranks(
    store: dist.Store, size: int, restarts: int, timeout: timedelta, hint: str
) -> tuple[dist.Store, int]:
    name = uuid4().hex
    attempt = dist.PrefixStore(name, store)
    missing = set(range(1, size))
    nonces: dict[int, str] = {}
    counts = {0: restarts}

    def all_joined() -> bool:
        for rank in sorted(missing):
            if store.check([f"hello/{rank}"]):
                nonce, count = store.get(f"hello/{rank}").decode().split()
                if nonces.get(rank) != nonce:
                    nonces[rank] = nonce
                    counts[rank] = int(count)
                    store.set(f"welcome/{nonce}", name)
            if attempt.check([f"here/{rank}"]):
                missing.remove(rank)
        return not missing

    _poll(
        all_joined, lambda: f"{ranks_text(sorted(missing))} of {size} did not join", timeout, hint
    )
    attempt.set("begin", str(max(counts.values())))
    return attempt, max(counts.values())


def wait_for_keys(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Wait until all keys are set, at most for some seconds; return whether they are set."""
    # No blocking read: Python would handle no signal meanwhile, and torch prints warnings when one
    # ends without an answer.
    began = time.monotonic()
    while (
        not (is_complete := not keys or store.check(keys))
        and (waited := time.monotonic() - began) < seconds
    ):
        time.sleep(_poll_seconds(waited))
    return is_complete


def _poll(
    is_done: Callable[[], bool], problem: Callable[[], str], timeout: timedelta, hint: str
) -> None:
    began = time.monotonic()
    limit = timeout.total_seconds()
    while not _answer(is_done, hint):
        waited = time.monotonic() - began
        if waited > limit:
            raise RunError(
                f"{problem()} within {limit:g} s",
                expected="every rank connects to the store of rank 0, with the same SAMESTEP_TOKEN and number of ranks",
                fix=hint,
                code="E_RENDEZVOUS",
            )
        time.sleep(_poll_seconds(waited))


def _poll_seconds(waited: float) -> float:
    """Return the time until the next read after a wait of some seconds."""
    return min(max(waited / 8, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS)


def _answer(is_done: Callable[[], bool], hint: str) -> bool:
    try:
        return is_done()
    except dist.DistError as error:
        raise RunError(
            f"the store of the job is gone: {str(error).splitlines()[0]}",
            expected="rank 0, or the launcher, hosts the store until the job ends",
            fix=hint,
            code="E_LAUNCHER_GONE",
        ) from error
