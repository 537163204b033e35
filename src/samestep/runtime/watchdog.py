"""Watches from outside whether ranks get on: finds who hangs, and tells of who is slow."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from samestep.runtime.board import Position
from samestep.runtime.majority import odd_ranks, ranks_text

HANG_AFTER = 600.0
# Collectives that wait for a rank that hangs give up after the watchdog has told of it.
LATER_SECONDS = 60.0

# A rank is slow when a shard takes it so many times what it takes the median rank, twice over so many seconds.
_SLOW_FACTOR = 1.5
_SLOW_SECONDS = 5.0
# Below this a shard is too small to say anything: seconds that the slow rank needs more, for each.
_SLOW_MARGIN = 0.005
_FRAMES_SHOWN = 10
_WAITING = ", waiting in "
_DISTRIBUTED = f"torch{os.sep}distributed{os.sep}"

Common = TypeVar("Common", bound=Hashable)


@dataclass(frozen=True)
class Seen:
    """One rank as the watchdog sees it.

    Attributes:
        has_ended: its process has ended, without failing.
        state: the kernel's letter for what its process does (proc(5)), `T` where a signal has stopped it; empty where
            the system does not tell.
        is_silent: nothing is heard of it.
    """

    position: Position
    has_ended: bool = False
    state: str = ""
    is_silent: bool = False


@dataclass(frozen=True)
class Hang:
    """Ranks that do not come, and ranks that wait for them.

    Attributes:
        seconds: for how long nothing has happened.
        hang_after: for how long nothing may happen, in seconds.
        seen: all ranks.
        stacks: the Python frames of each, outermost first; empty where a rank does not answer.
    """

    seconds: float
    hang_after: float
    seen: Mapping[int, Seen]
    stacks: Mapping[int, Sequence[str]]

    @property
    def culprits(self) -> list[int]:
        """Who is waited for; empty where nobody can tell.

        Who ended or left while others go on, else who is stopped or silent, else who does not wait, else who waits
        elsewhere than most, else who is behind.
        """
        seen = self.seen
        gone = [rank for rank, each in seen.items() if each.has_ended or each.position.is_over]
        stopped = [rank for rank, each in seen.items() if each.state == "T" or each.is_silent]
        busy = [rank for rank in seen if not self._waits(rank)]
        where = {rank: each.position.text.partition(_WAITING)[0] for rank, each in seen.items()}
        furthest = max(each.position.begun for each in seen.values())
        behind = [rank for rank, each in seen.items() if each.position.begun < furthest]
        found = (gone, stopped, busy, odd_ranks(where), behind)
        return next((ranks for ranks in found if 0 < len(ranks) < len(seen)), [])

    def _waits(self, rank: int) -> bool:
        """Whether a rank waits for others: in a collective of ours, or in one that a person called."""
        return self.seen[rank].position.waits or any(_DISTRIBUTED in frame for frame in self.stacks.get(rank, ())[-3:])


class Watchdog:
    """Looks at the ranks of one launch, now and then.

    Args:
        hang_after: seconds without any progress of any rank that make a hang.
    """

    def __init__(self, hang_after: float) -> None:
        self._hang_after = hang_after
        self._base: dict[int, Position] = {}
        self._base_time = time.monotonic()
        self._suspect: int | None = None
        self._told: set[int] = set()

    def idle(self, seen: Mapping[int, Seen]) -> float | None:
        """For how many seconds nothing has happened, if that is a hang.

        Before the first rank has come to `samestep.start()`, and when the last has left it, ranks are not watched: what
        a program does there is its own business.
        """
        watched = {rank: each for rank, each in seen.items() if not each.has_ended and not each.position.is_over}
        if not watched or not any(each.position.begun for each in watched.values()):
            return None
        seconds = time.monotonic() - max(each.position.since for each in watched.values())
        return seconds if seconds >= self._hang_after else None

    def slow(self, seen: Mapping[int, Seen]) -> str | None:
        """What there is to tell of a rank that has become slow; once for each rank."""
        now, positions = time.monotonic(), {rank: each.position for rank, each in seen.items()}
        if not self._base or not all(each.shards for each in self._base.values()):  # not all have begun
            self._base, self._base_time = positions, now
        if now - self._base_time < _SLOW_SECONDS:
            return None
        before, self._base, self._base_time = self._base, positions, now
        cost = {rank: _seconds_a_shard(before[rank], each.position) for rank, each in seen.items()}
        known = {rank: value for rank, value in cost.items() if value is not None}
        suspect, self._suspect = self._suspect, None
        if len(known) < 2 or len(known) < len(seen):
            return None
        slowest = max(known, key=lambda rank: known[rank])
        median = statistics.median(value for rank, value in known.items() if rank != slowest)
        more = known[slowest] - median
        if slowest in self._told or known[slowest] < _SLOW_FACTOR * median or more < _SLOW_MARGIN:
            return None
        self._suspect = slowest
        if suspect != slowest:
            return None
        self._told.add(slowest)
        return (
            f"rank {slowest} is slow: {known[slowest]:.3f} s a shard, data included, where the others take "
            f"{median:.3f} s and wait for it"
        )


def hang_text(hang: Hang) -> str:
    """The report on a hang: who is where, and the Python stack of each."""
    culprits = hang.culprits
    who = ranks_text(culprits) if culprits else "each rank"
    head = (
        f"{who} {'does' if len(culprits) == 1 else 'do'} not come: nothing" if culprits else "the ranks hang: nothing"
    )
    lines = [f"{head} has happened for {hang.seconds:.1f} s"]
    where = {rank: _where(each) for rank, each in hang.seen.items()}
    lines += [f"    {ranks_text(ranks)}: {text}" for text, ranks in _grouped(where, culprits).items()]
    traced = {rank: tuple(found[-_FRAMES_SHOWN:]) for rank, found in hang.stacks.items()}
    for found, ranks in _grouped(traced, culprits).items():
        lines.append(f"  stack of {ranks_text(ranks)}, innermost last:")
        lines += [f"    {frame}" for frame in found] or ["    none: the process does not answer"]
    lines.append(
        f"  rule: every rank reaches the next step within {hang.hang_after:g} s of the one before, --hang-after"
    )
    lines.append(
        f"  do:   look at the innermost lines of {who}; if it only needs longer, give it more: --hang-after, or "
        "launch(hang_after=...), start(timeout=...)"
    )
    return "\n".join(lines)


def _where(seen: Seen) -> str:
    text = seen.position.text or "before samestep.start()"
    if seen.has_ended:
        return f"has ended, {text}"
    if seen.is_silent:
        return f"{text}; since then nothing is heard of its process, which may be stopped, or its machine lost"
    return f"{text}; its process is stopped by a signal (SIGSTOP, a debugger)" if seen.state == "T" else text


def _grouped(found: Mapping[int, Common], first: Sequence[int]) -> dict[Common, list[int]]:
    """Ranks by what they have in common, the culprits first."""
    groups: dict[Common, list[int]] = {}
    for rank in sorted(found, key=lambda rank: (rank not in first, rank)):
        groups.setdefault(found[rank], []).append(rank)
    return groups


def _seconds_a_shard(before: Position, now: Position) -> float | None:
    shards = now.shards - before.shards
    return (now.own_seconds - before.own_seconds) / shards if shards else None
