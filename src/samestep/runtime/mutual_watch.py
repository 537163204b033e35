"""Ranks that no launcher of ours watches watch one another, through the store of their job.

A thread of each says every few seconds where its rank stands, and looks where the others do. When none gets on any
more, one of them tells of it, with the stacks of all, and every rank ends its own process: the threads run where the
main ones are stuck. A rank whose thread says nothing either is known by that.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

import torch.distributed as dist

from samestep.errors import EXIT_FAILED
from samestep.runtime.board import Position, Pulse
from samestep.runtime.failure import Failure
from samestep.runtime.job import Job
from samestep.runtime.tell_once import tell_once
from samestep.runtime.watchdog import Hang, Seen, Watchdog, hang_text

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.25, 5.0
_SILENT_LOOKS = 4
_PATIENCE_SECONDS = 1.0
_NAP_SECONDS = 0.02
_HANG = "hang"


@dataclass
class _Heard:
    """What one rank said last, and when that was new by this rank's own clock."""

    beat: str = ""
    beat_time: float = 0.0
    place: str = ""
    since: float = 0.0

    def hear(self, said: str) -> None:
        now = time.monotonic()
        beat, _, place = said.partition("\n")
        if beat != self.beat:
            self.beat, self.beat_time = beat, now
        if place != self.place:
            self.place, self.since = place, now

    def seen(self, silent_after: float) -> Seen:
        position = replace(Position(**json.loads(self.place)), since=self.since)
        return Seen(position, is_silent=time.monotonic() - self.beat_time > silent_after)


class MutualWatch:
    """One rank's part in the watch, in threads that end with the process.

    Args:
        store: of these ranks and this world alone; connections of its own are made to it.
        pulse: where this rank stands.
        hang_after: seconds without any progress of any rank after which the run is ended.
    """

    def __init__(self, job: Job, store: dist.Store, pulse: Pulse, hang_after: float) -> None:
        # The main thread may be stuck while it asks the store, and its connection with it.
        self._job = replace(job, store=job.store.clone())  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
        self._pulse, self._hang_after = pulse, hang_after
        self._interval = min(max(hang_after / 8, _SHORTEST_SECONDS), _LONGEST_SECONDS)
        self._watchdog = Watchdog(hang_after)
        self._heard: dict[int, _Heard] = {}
        self._beats = 0
        self._answered = time.monotonic()
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._ends_all = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="samestep-watch", daemon=True)
            for target in (self._look_on, self._mind_the_store)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the watch of this rank."""
        self._closed.set()
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)

    def let_it_end(self) -> None:
        """For the main thread, when it is torn from its wait: do not go on where this watch is ending the process.

        Ranks end on account of a hang one after the other; that one did is no news for those that are about to.
        """
        if self._ends_all.is_set():
            self._threads[0].join()

    def _look_on(self) -> None:
        try:
            self._say()
            while not self._closed.wait(self._interval):
                self._say()
                self._look()
        except dist.DistError:
            if self._ends_all.is_set():
                _leave(EXIT_FAILED)
            return  # who hosts the store is gone; the main thread finds out, or the other one here ends it

    def _say(self) -> None:
        self._beats += 1
        self._store.set(str(self._job.rank), f"{self._beats}\n{json.dumps(asdict(self._pulse.position))}")

    def _look(self) -> None:
        seen = self._seen()
        self._answered = time.monotonic()
        seconds = self._watchdog.idle(seen)
        if seconds or self._store.check([_HANG]):
            self._end(seen, seconds or self._hang_after)
        elif self._job.rank == 0 and (told := self._watchdog.slow(seen)):
            print(told, file=sys.stderr, flush=True)

    def _seen(self) -> dict[int, Seen]:
        ranks = range(self._job.size)
        here = [rank for rank in ranks if rank in self._heard or self._store.check([str(rank)])]
        for rank, said in zip(here, self._store.multi_get([str(rank) for rank in here]), strict=True):
            self._heard.setdefault(rank, _Heard()).hear(said.decode())
        silent_after = _SILENT_LOOKS * self._interval
        nothing = Seen(Position(), is_silent=True)
        return {rank: self._heard[rank].seen(silent_after) if rank in self._heard else nothing for rank in ranks}

    def _end(self, seen: dict[int, Seen], seconds: float) -> NoReturn:
        """Tell of the hang, if no other rank does, and end this process."""
        self._ends_all.set()
        self._store.set(_HANG, "")
        self._store.set(f"stack/{self._job.rank}", json.dumps(_stack(self._watched)))
        stacks = self._stacks([rank for rank, each in seen.items() if not each.is_silent])
        hang = Hang(seconds, self._hang_after, seen, stacks)
        culprit = next(iter(hang.culprits), 0)
        failure = Failure.of_hang(culprit, hang_text(hang), seen[culprit].position.text)
        is_first, code = tell_once(self._job, failure)
        if is_first:
            print(failure.text, file=sys.stderr, flush=True)
        _leave(code)

    def _stacks(self, ranks: Sequence[int]) -> dict[int, list[str]]:
        """The stacks of these ranks, and of those that say nothing an empty one."""
        until = time.monotonic() + self._interval + _PATIENCE_SECONDS
        keys = {rank: f"stack/{rank}" for rank in ranks}
        while not self._store.check(list(keys.values())) and time.monotonic() < until:
            time.sleep(_NAP_SECONDS)
        known = [rank for rank in ranks if self._store.check([keys[rank]])]
        return {
            rank: json.loads(self._store.get(keys[rank])) if rank in known else [] for rank in range(self._job.size)
        }

    def _mind_the_store(self) -> None:
        """End this process when it gets on no more and cannot ask about the others."""
        while not self._closed.wait(self._interval):
            position, now = self._pulse.position, time.monotonic()
            seconds = now - max(self._answered, position.since)
            if seconds >= self._hang_after:
                # Ranks cannot agree on who tells; whoever hosts the store is in no state to.
                if self._job.rank == (0 if self._job.is_guest else 1):
                    print(self._without_store(seconds, position), file=sys.stderr, flush=True)
                _leave(EXIT_FAILED)

    def _without_store(self, seconds: float, position: Position) -> str:
        address, port = self._job.host
        whose = "the launcher" if self._job.is_guest else "rank 0"
        frames = "".join(f"    {frame}\n" for frame in _stack(self._watched)[-10:])
        return (
            f"error: {whose} does not come: the store of the job, at {address}:{port}, has not answered for "
            f"{seconds:.1f} s\n"
            f"    rank {self._job.rank}: {position.text}\n"
            f"  stack of rank {self._job.rank}, innermost last:\n{frames}"
            f"  rule: every rank reaches the next step within {self._hang_after:g} s of the one before\n"
            f"  do:   look whether the process of {whose} is stopped, or its machine lost"
        )


def _stack(thread: int) -> list[str]:
    """`file:line function` of a thread of this process, outermost first."""
    frame = sys._current_frames().get(thread)
    return [f"{each.filename}:{each.lineno} {each.name}" for each in traceback.extract_stack(frame)] if frame else []


def _leave(code: int) -> NoReturn:
    # The main thread is stuck, so nothing else ends this process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
