"""Slow ranks are reported once, after two intervals."""

import time

import pytest

from samestep.distributed.status import StatusSnapshot
from samestep.launcher.slow_ranks import SlowRanks
from samestep.launcher.watchdog import RankState


def slow(
    monkeypatch: pytest.MonkeyPatch, *seconds: float, microbatches: tuple[int, ...] = (10, 10, 10)
) -> list[str | None]:
    """Return the messages of four intervals with the given seconds per microbatch and rank."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    slow_ranks = SlowRanks()
    messages = []
    for interval in range(1, 5):
        now += 60
        statuses = [
            StatusSnapshot(compute_seconds=interval * count * cost, microbatches=interval * count)
            for cost, count in zip(seconds, microbatches, strict=True)
        ]
        messages.append(slow_ranks.message({rank: RankState(status) for rank, status in enumerate(statuses)}))
    return messages


def test_slow_rank_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third, fourth = slow(monkeypatch, 0.1, 0.3, 0.1)
    assert (first, second, fourth) == (None, None, None), "a single interval does not suffice"
    assert third == ("rank 1 is slow: 0.300 s per microbatch, data included; the other ranks need 0.100 s and wait")


def test_rank_with_more_microbatches_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slow(monkeypatch, 0.1, 0.1, 0.1, microbatches=(10, 30, 10)) == [None] * 4


def test_similar_ranks_are_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slow(monkeypatch, 0.1, 0.12, 0.1) == [None] * 4
    assert slow(monkeypatch, 0.0001, 0.001, 0.0001) == [None] * 4
