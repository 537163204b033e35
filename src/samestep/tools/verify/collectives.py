"""Counts the collectives that a model issues while it computes a shard."""

from __future__ import annotations

import threading

from samestep.runtime.collectives import hear_collectives


class CollectiveCount:
    """Counts between `begin` and `end`, by thread; what the engine issues elsewhere is not a model's."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        # For the life of this process, which a trial has for itself.
        hear_collectives(lambda: threading.get_ident() in self._counts, self._count)

    def begin(self) -> None:
        """A forward begins in this thread."""
        self._counts[threading.get_ident()] = 0

    def end(self) -> int:
        """How many there were since."""
        return self._counts.pop(threading.get_ident(), 0)

    def _count(self, what: str, waits: bool) -> None:
        self._counts[threading.get_ident()] += 1
