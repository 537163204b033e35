"""The watchdog names who is waited for, and whom the others wait for longest."""

import time
from dataclasses import replace

import pytest

from samestep.runtime.board import Position
from samestep.runtime.watchdog import Hang, Seen, Watchdog, hang_text

AGES_AGO = -100.0
WAITING = Position(7, AGES_AGO, text="in engine.step 6, waiting in an all-reduce", waits=True)
COMPUTING = Position(7, AGES_AGO, text="in engine.step 6")
BEHIND = Position(6, AGES_AGO, text="after engine.step 5")


def seen(*positions: Position) -> dict[int, Seen]:
    return {rank: Seen(position) for rank, position in enumerate(positions)}


def culprits(found: dict[int, Seen], stacks: dict[int, list[str]] | None = None) -> list[int]:
    assert Watchdog(10).idle(found)
    return Hang(12, 10, found, stacks or {}).culprits


def test_who_is_behind_is_waited_for() -> None:
    assert culprits(seen(WAITING, WAITING, BEHIND, WAITING)) == [2]
    assert culprits(seen(BEHIND, WAITING, BEHIND, WAITING)) == [0, 2]
    behind_and_waits = replace(BEHIND, text=WAITING.text, waits=True)
    assert culprits(seen(WAITING, behind_and_waits, WAITING)) == [1]


def test_who_does_not_wait_is_waited_for() -> None:
    assert culprits(seen(WAITING, COMPUTING, WAITING, WAITING)) == [1]


def test_who_is_stopped_by_a_signal_is_waited_for() -> None:
    found = seen(WAITING, WAITING, WAITING, WAITING)
    found[3] = Seen(WAITING, state="T")
    assert culprits(found) == [3]


def test_who_has_ended_or_left_is_waited_for() -> None:
    found = seen(WAITING, WAITING, replace(WAITING, is_over=True), WAITING)
    assert culprits(found) == [2]
    found = seen(WAITING, WAITING, WAITING, WAITING)
    found[0] = Seen(WAITING, has_ended=True)
    assert culprits(found) == [0]


def test_who_went_another_way_is_waited_for() -> None:
    other = replace(WAITING, text="in engine.evaluate, waiting in an all-reduce")
    assert culprits(seen(other, WAITING, WAITING, WAITING)) == [0]


def test_where_nobody_can_tell_nobody_is_named() -> None:
    other = replace(WAITING, text="in engine.evaluate, waiting in an all-reduce")
    assert culprits(seen(other, WAITING)) == []
    assert culprits(seen(COMPUTING, COMPUTING)) == []


def test_who_waits_in_a_collective_that_a_person_called_is_not_waited_for() -> None:
    stacks = {rank: ["train.py:9 main", "/x/torch/distributed/distributed_c10d.py:1 all_reduce"] for rank in (0, 1, 3)}
    ahead = replace(WAITING, begun=8, text="after end of samestep.start(), waiting in a barrier")
    assert culprits(seen(BEHIND, BEHIND, ahead, BEHIND), stacks) == [2]


def test_one_rank_that_gets_on_is_no_hang() -> None:
    assert Watchdog(10).idle(seen(WAITING, replace(COMPUTING, since=time.monotonic()))) is None


@pytest.mark.parametrize("position", [Position(), replace(WAITING, is_over=True)])
def test_before_the_start_and_after_the_end_nobody_is_watched(position: Position) -> None:
    assert Watchdog(10).idle(seen(position, position)) is None


def test_the_report_has_the_culprit_first_and_each_stack_once() -> None:
    stacks = {0: ["a.py:1 f", "b.py:2 g"], 1: ["a.py:9 f"], 2: ["a.py:1 f", "b.py:2 g"]}
    text = hang_text(Hang(12.34, 10, seen(WAITING, BEHIND, WAITING), stacks))
    head, *lines = text.splitlines()
    assert head == "rank 1 does not come: nothing has happened for 12.3 s"
    assert lines == [
        "    rank 1: after engine.step 5",
        "    ranks 0 and 2: in engine.step 6, waiting in an all-reduce",
        "  stack of rank 1, innermost last:",
        "    a.py:9 f",
        "  stack of ranks 0 and 2, innermost last:",
        "    a.py:1 f",
        "    b.py:2 g",
        "  rule: every rank reaches the next step within 10 s of the one before, --hang-after",
        "  do:   look at the innermost lines of rank 1; if it only needs longer, give it more: --hang-after, or "
        "launch(hang_after=...), start(timeout=...)",
    ]


def test_a_rank_that_does_not_answer_is_told_as_such() -> None:
    found = seen(WAITING, WAITING)
    found[1] = Seen(BEHIND, state="T")
    text = hang_text(Hang(12, 10, found, {0: ["a.py:1 f"], 1: []}))
    assert "rank 1: after engine.step 5; its process is stopped by a signal" in text
    assert "none: the process does not answer" in text


def slow(monkeypatch: pytest.MonkeyPatch, *seconds: float, shards: tuple[int, ...] = (10, 10, 10)) -> list[str | None]:
    """What is told after long looks in each of which each shard took so many seconds."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watchdog = Watchdog(10)
    told = []
    for turn in range(1, 5):
        now += 60
        positions = [
            Position(own_seconds=turn * count * each, shards=turn * count)
            for each, count in zip(seconds, shards, strict=True)
        ]
        told.append(watchdog.slow(seen(*positions)))
    return told


def test_a_slow_rank_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third, fourth = slow(monkeypatch, 0.1, 0.3, 0.1)
    assert (first, second, fourth) == (None, None, None), "a moment says nothing"
    assert third == "rank 1 is slow: 0.300 s a shard, data included, where the others take 0.100 s and wait for it"


def test_a_rank_with_more_shards_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slow(monkeypatch, 0.1, 0.1, 0.1, shards=(10, 30, 10)) == [None] * 4


def test_ranks_that_are_alike_are_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slow(monkeypatch, 0.1, 0.12, 0.1) == [None] * 4
    assert slow(monkeypatch, 0.0001, 0.001, 0.0001) == [None] * 4
