"""The roll call: before ranks do something together, each says what, and all see whether they mean the same.

Every rank numbers what it is about to do with the others and puts it into the job's store under that number. Then it
reads what the others put under the same number, and waits for those that are not there yet. Where they differ, every
rank stops before it communicates, and says who was about to do what, and where. A rank that left the loop, or went
another way, is found by what it does next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from samestep.errors import PeerLostError, RollCallError
from samestep.runtime.board import Pulse
from samestep.runtime.call_site import call_site
from samestep.runtime.collectives import hear_collectives
from samestep.runtime.majority import odd_ranks, ranks_text

# Once two ranks are seen to differ, how long the others may take to say where they are.
_PATIENCE_SECONDS = 2.0
# Less than the launcher gives to the other ranks after the first failure.
_PARTING_SECONDS = 0.5
_SHORTEST_NAP, _LONGEST_NAP = 0.00005, 0.25


@dataclass(frozen=True)
class Entry:
    """What one rank is about to do.

    Attributes:
        what: the same on every rank, if all is well.
        where: the line that asks for it; ranks may come from different lines.
        compared: how many of its entries the rank had compared by then.
    """

    what: str
    where: str
    compared: int

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


class RollCall:
    """Numbers what this rank does with the others, and compares; silent until `begin`.

    Args:
        store: the job's; a connection of its own is made to it.
        pulse: hears of everything that ranks do together, whether the roll is called or not.
        timeout: how long a rank waits for the others.
    """

    def __init__(self, store: dist.Store, pulse: Pulse, *, rank: int, size: int, timeout: timedelta) -> None:
        self._pulse = pulse
        self._job_store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._store: dist.Store | None = None
        self._restore: Callable[[], None] | None = None
        self._thread = threading.get_ident()
        self._is_inside = False
        self._engines = 0
        self._last_call = ""
        self._mine: dict[int, Entry] = {}  # those that are in the store
        self._said = self._compared = 0

    def begin(self, word: int) -> None:
        """From now on the roll is called.

        Args:
            word: the same on every rank, and another one whenever the same store is used again.
        """
        if self._size > 1 and self._store is None:
            self._store = dist.PrefixStore(f"samestep/roll-call/{word}", self._job_store.clone())  # type: ignore[attr-defined]
            self._restore = hear_collectives(self._listens, self._hear)

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """The life of the world: its end is a call too."""
        try:
            yield
            with self.during("end of samestep.start()"):
                pass
        finally:
            if self._restore is not None:
                self._restore()
            self._store = self._restore = None

    def name_engine(self) -> str:
        """`engine`, and `engine 2` for the second of this world."""
        self._engines += 1
        return "engine" if self._engines == 1 else f"engine {self._engines}"

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Call the roll for something that ranks do together; what happens inside the block is part of it.

        Raises:
            RollCallError: the ranks are about to do different things, or one does not come.
            PeerLostError: the store is gone.
        """
        outermost = not self._is_inside
        with self._pulse.during(what):
            if outermost and self._store is not None:
                self._say(what)
                with self._pulse.waiting("the roll call"):
                    self._compare(self._store)
                self._last_call = what
            self._is_inside = True
            try:
                yield
            finally:
                self._is_inside = not outermost

    def _listens(self) -> bool:
        """What runs inside of a call, or beside this thread, is ours."""
        return not self._is_inside and threading.get_ident() == self._thread and self._store is not None

    def _hear(self, what: str, waits: bool) -> None:
        assert self._store is not None
        self._say(what)
        # A rank that does not wait may be needed elsewhere before the others come: they compare at the next call.
        if waits:
            self._compare(self._store)

    def _say(self, what: str) -> None:
        assert self._store is not None
        entry = Entry(what, call_site(), self._compared)
        self._said += 1
        self._mine[self._said] = entry
        with self._guarded():
            self._store.set(f"{self._said}/{self._rank}", f"{entry.compared}\n{entry.what}\n{entry.where}")

    def _compare(self, store: dist.Store) -> None:
        with self._guarded():
            while self._compared < self._said:
                number = self._compared + 1
                entries = self._read(store, number)
                if len({entry.what for entry in entries.values()}) > 1:
                    self._wait_for_readers(store)
                    raise self._difference(entries)
                self._compared = number
            # Who has compared an entry reads it no more; so the store holds a few of a rank at any time.
            done = min(entry.compared for entry in entries.values())
            for number in [number for number in self._mine if number <= done]:
                del self._mine[number]
                store.delete_key(f"{number}/{self._rank}")

    def _read(self, store: dist.Store, number: int) -> dict[int, Entry]:
        """Every rank's entry; where ranks differ already, of those who have said theirs."""
        keys = {rank: f"{number}/{rank}" for rank in range(self._size) if rank != self._rank}
        began = time.monotonic()
        here = list(keys)
        while not store.check(list(keys.values())):
            waited = time.monotonic() - began
            if waited > min(_PATIENCE_SECONDS, self._timeout.total_seconds()):
                here = [rank for rank, key in keys.items() if store.check([key])]
                entries = self._fetch(store, keys, here, number)
                if len({entry.what for entry in entries.values()}) > 1:
                    return entries
                if waited > self._timeout.total_seconds():
                    self._wait_for_readers(store)
                    raise self._absence(store, [rank for rank in keys if rank not in here], number)
                here = list(keys)
            # Not a blocking read: torch writes warnings to the terminal when one ends without an answer.
            time.sleep(min(max(waited / 8, _SHORTEST_NAP), _LONGEST_NAP))
        return self._fetch(store, keys, here, number)

    def _wait_for_readers(self, store: dist.Store) -> None:
        """Give the others a moment to see it too: the store may end with rank 0's process."""
        store.set(f"seen/{self._rank}", "")
        seen = [f"seen/{rank}" for rank in range(self._size)]
        patience = time.monotonic() + _PARTING_SECONDS
        while self._rank == 0 and not store.check(seen) and time.monotonic() < patience:
            time.sleep(0.01)

    def _fetch(self, store: dist.Store, keys: dict[int, str], ranks: list[int], number: int) -> dict[int, Entry]:
        texts = store.multi_get([keys[rank] for rank in ranks]) if ranks else []
        found = {rank: _entry(text) for rank, text in zip(ranks, texts, strict=True)}
        return dict(sorted({**found, self._rank: self._mine[number]}.items()))

    def _difference(self, entries: dict[int, Entry]) -> RollCallError:
        whats = {rank: entry.what for rank, entry in entries.items()}
        odd = odd_ranks(whats)
        missing = [rank for rank in range(self._size) if rank not in entries]
        ranks_by_text: dict[str, list[int]] = {}
        for rank in sorted(entries, key=lambda rank: (rank not in odd, rank)):
            ranks_by_text.setdefault(str(entries[rank]), []).append(rank)
        lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
        lines += [f"{ranks_text(missing)}: elsewhere"] if missing else []
        who = f"{ranks_text(odd)} went another way than the others" if odd else "ranks went different ways"
        one = ranks_text(odd) if odd else "one rank"
        return RollCallError(
            f"{self._since()}{who}:\n    " + "\n    ".join(lines),
            rule="every rank makes the same steps, evaluations and collectives, in the same order",
            do=f"look there for what only {one} does or leaves out, such as `if world.is_main:` around it; what ranks "
            "do together, every rank must call",
        )

    def _absence(self, store: dist.Store, missing: list[int], number: int) -> RollCallError:
        lines = []
        for rank in missing:
            last = next((n for n in range(number - 1, 0, -1) if store.check([f"{n}/{rank}"])), 0)
            said = str(_entry(store.get(f"{last}/{rank}"))) if last else "nothing"
            lines.append(f"{ranks_text([rank])} did last: {said}")
        return RollCallError(
            f"{self._since()}{ranks_text(missing)} did not come to {self._mine[number]} within "
            f"{self._timeout.total_seconds():g} s\n    " + "\n    ".join(lines),
            rule="every rank makes the same steps, evaluations and collectives, in the same order",
            do="look there for what it waits for; samestep.start(timeout=...) gives it longer",
        )

    def _since(self) -> str:
        return f"after {self._last_call}, " if self._last_call else ""

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise PeerLostError(f"rank {self._rank} lost its connection to the store of the job: {error}") from error


def _entry(text: bytes) -> Entry:
    compared, what, where = text.decode().split("\n")
    return Entry(what, where, int(compared))
