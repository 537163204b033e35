"""Operation monitor: finds ranks that wait in different operations.

A rank that waits for others in its step cannot receive an error through the messages of the step. A thread therefore
stores an operation that lasts more than a second in the job's store, and reads those of the other ranks.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from samestep.distributed.interception import call_site

_WAIT_SECONDS, _POLL_SECONDS = 1.0, 0.25
_LINE_BYTES, _FACTS_BYTES = 500, 3000


@dataclass(frozen=True, eq=False)
class PendingOperation:
    """An operation that a rank has begun.

    Attributes:
        number: operations of the rank until this one; equal on every rank of a healthy run.
        name: name of the operation.
        facts: properties that are equal on every rank.
        line: source line of the call.
        began: monotonic clock of the process.
    """

    number: int
    name: str
    facts: Mapping[str, str]
    line: str = ""
    began: float = 0.0

    def to_text(self, line: str) -> str:
        """Return the stored form, with long texts cut."""
        facts = {key: ascii(value)[1:-1][: _FACTS_BYTES // len(self.facts)] for key, value in self.facts.items()}
        return json.dumps([self.number, self.name, facts, line[-_LINE_BYTES:]])

    @classmethod
    def from_text(cls, data: bytes) -> PendingOperation:
        """Parse the stored form."""
        return cls(*json.loads(data))


class OperationMonitor:
    """Compares operations of the calling thread that last long with those of the other ranks.

    Attributes:
        difference: the operations of the ranks that wait, by rank, once two of the same number differ; None otherwise.
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self._job_store, self._rank, self._size = store, rank, size
        self._thread_id = threading.get_ident()
        self._ended = threading.Event()
        self._pending: PendingOperation | None = None
        self._number = 0
        self.difference: dict[int, PendingOperation] | None = None
        # A daemon thread: the store may be lost.
        self._thread = threading.Thread(target=self._run, name="samestep-operation-monitor", daemon=True)
        if size > 1:
            self._thread.start()

    def begin(self, name: str, facts: Mapping[str, str]) -> None:
        """Record the operation of this rank."""
        self._number += 1
        self._pending = PendingOperation(self._number, name, facts, began=time.monotonic())

    def finish(self) -> None:
        """Record that this rank is in no operation."""
        self._pending = None

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_WAIT_SECONDS)

    def _run(self) -> None:
        store, stored = None, None
        while not self._ended.wait(_POLL_SECONDS):
            pending = self._pending
            if pending is None or time.monotonic() - pending.began < _WAIT_SECONDS:
                continue
            try:
                if store is None:  # a connection of its own: a blocking read of another thread would delay this one
                    store = dist.PrefixStore("samestep/operations", self._job_store.clone())  # type: ignore[attr-defined]
                if stored is not pending:
                    line = call_site(sys._current_frames().get(self._thread_id))
                    store.set(str(self._rank), pending.to_text(line))
                    stored = pending
                rows = self._read(store, pending.number)
                if not _differ(rows):
                    continue
                self.difference = rows
                self._ended.wait(_POLL_SECONDS)  # for further ranks
                self.difference = self._read(store, pending.number)
            except dist.DistError:
                return  # the store ended with its process; ranks and launcher detect that themselves
            return

    def _read(self, store: dist.Store, number: int) -> dict[int, PendingOperation]:
        ranks = [rank for rank in range(self._size) if store.check([str(rank)])]
        rows = {rank: PendingOperation.from_text(store.get(str(rank))) for rank in ranks}
        return {rank: row for rank, row in rows.items() if row.number == number}


def _differ(rows: Mapping[int, PendingOperation]) -> bool:
    return len({json.dumps([row.name, row.facts]) for row in rows.values()}) > 1
