"""The watchdog names who is waited for, and whom the others wait for longest."""

import time
from dataclasses import replace

import pytest

from samestep.runtime.board import Position
from samestep.runtime.watchdog import Seen, Watchdog, hang_text

AGES_AGO = -100.0
WAITING = Position(7, AGES_AGO, text="in engine.step 6, waiting in an all-reduce", waits=True)
COMPUTING = Position(7, AGES_AGO, text="in engine.step 6")
BEHIND = Position(6, AGES_AGO, text="after engine.step 5")


def seen(*positions: Position) -> dict[int, Seen]:
    return {rank: Seen(position) for rank, position in enumerate(positions)}


def culprits(found: dict[int, Seen]) -> tuple[int, ...]:
    hang = Watchdog(10).hang(found)
    assert hang is not None
    return hang.culprits


def test_who_is_behind_is_waited_for() -> None:
    assert culprits(seen(WAITING, WAITING, BEHIND, WAITING)) == (2,)
    assert culprits(seen(BEHIND, WAITING, BEHIND, COMPUTING)) == (0, 2)


def test_who_does_not_wait_is_waited_for() -> None:
    assert culprits(seen(WAITING, COMPUTING, WAITING, WAITING)) == (1,)


def test_who_is_stopped_by_a_signal_is_waited_for() -> None:
    found = seen(WAITING, WAITING, WAITING, WAITING)
    found[3] = Seen(WAITING, state="T")
    assert culprits(found) == (3,)


def test_who_has_ended_or_left_is_waited_for() -> None:
    found = seen(WAITING, WAITING, replace(WAITING, is_over=True), WAITING)
    assert culprits(found) == (2,)
    found = seen(WAITING, WAITING, WAITING, WAITING)
    found[0] = Seen(WAITING, has_ended=True)
    assert culprits(found) == (0,)


def test_who_went_another_way_is_waited_for() -> None:
    other = replace(WAITING, text="in engine.evaluate, waiting in an all-reduce")
    assert culprits(seen(other, WAITING, WAITING, WAITING)) == (0,)


def test_where_nobody_can_tell_nobody_is_named() -> None:
    other = replace(WAITING, text="in engine.evaluate, waiting in an all-reduce")
    assert culprits(seen(other, WAITING)) == ()
    assert culprits(seen(COMPUTING, COMPUTING)) == ()


def test_one_rank_that_gets_on_is_no_hang() -> None:
    assert Watchdog(10).hang(seen(WAITING, replace(COMPUTING, since=time.monotonic()))) is None


@pytest.mark.parametrize("position", [Position(), replace(WAITING, is_over=True)])
def test_before_the_start_and_after_the_end_nobody_is_watched(position: Position) -> None:
    assert Watchdog(10).hang(seen(position, position)) is None


def test_the_report_has_the_culprit_first_and_each_stack_once() -> None:
    hang = Watchdog(10).hang(seen(WAITING, BEHIND, WAITING))
    assert hang is not None
    text = hang_text(hang, {0: ["a.py:1 f", "b.py:2 g"], 1: ["a.py:9 f"], 2: ["a.py:1 f", "b.py:2 g"]})
    head, *lines = text.splitlines()
    assert head.startswith("rank 1 does not come: nothing has happened for ")
    assert lines == [
        "    rank 1: after engine.step 5",
        "    ranks 0 and 2: in engine.step 6, waiting in an all-reduce",
        "  stack of rank 1, innermost last:",
        "    a.py:9 f",
        "  stack of ranks 0 and 2, innermost last:",
        "    a.py:1 f",
        "    b.py:2 g",
        "  rule: every rank reaches the next step within --hang-after 10 s of the one before",
        "  do:   look at the innermost lines of rank 1; if it only needs longer, give it: --hang-after",
    ]


def test_a_rank_that_does_not_answer_is_told_as_such() -> None:
    found = seen(WAITING, WAITING)
    found[1] = Seen(BEHIND, state="T")
    hang = Watchdog(10).hang(found)
    assert hang is not None
    text = hang_text(hang, {0: ["a.py:1 f"], 1: []})
    assert "rank 1: after engine.step 5; its process is stopped by a signal" in text
    assert "none: the process does not answer" in text


def slow(monkeypatch: pytest.MonkeyPatch, *seconds: float, shards: tuple[int, ...] = (10, 10, 10)) -> list[str | None]:
    """What is told after two long looks in which each shard took so many seconds."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watchdog = Watchdog(10)
    told = []
    for turn in range(3):
        now += 60
        positions = [
            Position(own_seconds=turn * count * each, shards=turn * count)
            for each, count in zip(seconds, shards, strict=True)
        ]
        told.append(watchdog.slow(seen(*positions)))
    return told


def test_a_slow_rank_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = slow(monkeypatch, 0.1, 0.3, 0.1)
    assert (first, third) == (None, None)
    assert second == "rank 1 is slow: 0.300 s a shard, data included, where the others take 0.100 s and wait for it"


def test_a_rank_with_more_shards_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slow(monkeypatch, 0.1, 0.1, 0.1, shards=(10, 30, 10)) == [None, None, None]


def test_ranks_that_are_alike_are_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slow(monkeypatch, 0.1, 0.12, 0.1) == [None, None, None]
    assert slow(monkeypatch, 0.0001, 0.001, 0.0001) == [None, None, None]
