"""Collective check: all ranks confirm that they issue the same operation before it communicates.

Operations of this package begin with a small all-reduce of a hash of their name and facts. A step
that follows the
same step as before adds the step hash to its statistics instead: no message of its own. If hashes
    differ, ranks
exchange the texts, and every rank raises an error.

A rank that waits for others in its step cannot receive an error through the messages of the step.
`OperationMonitor`, a thread, therefore stores an operation that lasts more than a second in the
job's store, and reads those of the others.

Decisions: docs/decisions/rank-checks.md
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from samestep.distributed.backend_errors import is_lost_connection
from samestep.distributed.interception import call_site
from samestep.distributed.status import RankStatus, odd_ranks, ranks_text
from samestep.errors import PeerLostError, RankDesyncError, RankMismatchError

# Less than the launcher gives to the other ranks after the first failure.
_READERS_SECONDS = 0.5
_WAIT_SECONDS = 1.0  # then an operation is stored, and the difference of pending operations is read
_POLL_SECONDS = 0.25
# Facts with an error code of their own.
BATCH = "global batch"
DATASET = "dataset"
# Of a rank's text in an error; limits of its parts.
_TEXT_BYTES = 4000
_LINE_BYTES = 500
_FACTS_BYTES = 3000


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

    def to_text(self, line: str, facts_bytes: int = _FACTS_BYTES) -> str:
        """Return the stored form, with long texts cut."""
        facts = {
            key: ascii(value)[1:-1][: facts_bytes // len(self.facts)]
            for key, value in self.facts.items()
        }
        return json.dumps([self.number, self.name, facts, line[-_LINE_BYTES:]])

    @classmethod
    def from_text(cls, data: bytes) -> PendingOperation:
        """Parse the stored form."""
        return cls(*json.loads(data))


class OperationMonitor:
    """Compares operations of the calling thread that last long with those of the other ranks.

    Attributes:
        difference: the operations of the ranks that wait, by rank, once two of the same number
            differ; None otherwise.
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self._job_store = store
        self._rank = rank
        self._size = size
        self._thread_id = threading.get_ident()
        self._ended = threading.Event()
        self._pending: PendingOperation | None = None
        self._number = 0
        self.difference: dict[int, PendingOperation] | None = None
        # A daemon thread: the store may be lost.
        self._thread = threading.Thread(
            target=self._run, name="samestep-operation-monitor", daemon=True
        )
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
        store = None
        stored = None
        while not self._ended.wait(_POLL_SECONDS):
            pending = self._pending
            if pending is None or time.monotonic() - pending.began < _WAIT_SECONDS:
                continue
            try:
                if (
                    store is None
                ):  # a connection of its own: a blocking read of another thread would delay this one
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


class CollectiveCheck:
    """Compares the operations of this rank with those of the other ranks.

    `rank_status` receives every operation.
    """

    def __init__(
        self,
        store: dist.Store,
        rank_status: RankStatus,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
    ) -> None:
        self._rank_status = rank_status
        self._rank = rank
        self._size = size
        self._group = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
        self._thread = threading.get_ident()
        self._is_inside = False
        self._after = ""  # for messages
        self._monitor = OperationMonitor(store, rank=rank, size=size)

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Compare the end of the block, an operation of all ranks, and end the monitor."""
        try:
            yield
            with self.operation("end of samestep.init()"):
                pass
        finally:
            self._monitor.end()

    @contextmanager
    def operation(self, name: str, facts: Mapping[str, str] | None = None) -> Iterator[None]:
        """Check an operation of all ranks, with facts that are equal on all; collectives in the block belong to it.

        Raises:
            RankDesyncError: ranks issue different operations, or a rank issues none.
            RankMismatchError: facts differ.
            PeerLostError: another rank is gone.
        """
        is_outermost = not self._is_inside
        with self._rank_status.operation(name):
            self._is_inside = True
            try:
                if is_outermost:
                    self.agree(name, facts or {})
                    self._after = f"after {name}, "
                yield
            except PeerLostError as error:  # perhaps it ended because of the difference
                self._raise_difference(error)
                raise
            finally:
                self._is_inside = not is_outermost
                if is_outermost:
                    self._monitor.finish()

    def begin_collective(self, name: str) -> None:
        """Check a collective of the user that is called through this package."""
        if not self._is_inside and threading.get_ident() == self._thread:
            self.agree(name, {})
            self._monitor.finish()

    def agree(self, name: str, facts: Mapping[str, str]) -> None:
        """Compare a name and facts between ranks, by one small all-reduce; raise on every rank if they differ."""
        if self._size == 1:
            return
        self._monitor.begin(name, facts)
        if len(set(self._rows(torch.tensor([_hash_of(name, facts)])).flatten().tolist())) == 1:
            return
        data = PendingOperation(0, name, facts).to_text(call_site(), _TEXT_BYTES // 4).encode()
        own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [
            PendingOperation.from_text(bytes(row.tolist()).rstrip(b"\0")) for row in self._rows(own)
        ]
        raise self._difference(dict(enumerate(rows)))

    def _difference(
        self, rows: Mapping[int, PendingOperation]
    ) -> RankDesyncError | RankMismatchError:
        """Return the error for names, source lines and facts that differ between ranks."""
        names = {row.name for row in rows.values()}
        if len(names) > 1:
            return self._desync_error(rows)
        return _mismatch_error(names.pop(), {rank: row.facts for rank, row in rows.items()})

    def _raise_difference(self, cause: Exception) -> None:
        if self._monitor.difference is not None:
            raise self._difference(self._monitor.difference) from cause

    def _rows(self, own: torch.Tensor) -> torch.Tensor:
        """Gather integers, one row per rank, in a group that is separate from collectives of the script."""
        rows = torch.zeros(self._size, len(own), dtype=own.dtype)
        rows[self._rank] = own
        with self._rank_status.waiting("the collective check"), self._gloo_errors():
            # Each element has one summand other than zero.
            work = dist.all_reduce(rows, group=self._group, async_op=True)
            try:
                work.wait(timedelta(seconds=_WAIT_SECONDS))
            except RuntimeError as error:
                while not work.is_completed():  # not failed
                    if self._monitor.difference is not None:
                        time.sleep(_READERS_SECONDS)
                        self._raise_difference(error)
                    time.sleep(_POLL_SECONDS)
                work.wait()
        return rows

    @contextmanager
    def _gloo_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(
                error
            ):  # such as an error of a worker of a loader, raised by a signal handler
                raise
            raise PeerLostError(
                f"rank {self._rank} lost its connection to another rank: {error}"
            ) from error

    def _desync_error(self, rows: Mapping[int, PendingOperation]) -> RankDesyncError:
        odd = odd_ranks({rank: row.name for rank, row in rows.items()})
        missing = [rank for rank in range(self._size) if rank not in rows]
        ranks_by_text: dict[str, list[int]] = {}
        for rank in sorted(rows, key=lambda rank: (rank not in odd, rank)):
            ranks_by_text.setdefault(f"{rows[rank].name} at {rows[rank].line}", []).append(rank)
        lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
        lines += [f"{ranks_text(missing)}: no operation yet"] if missing else []
        problem = f"{ranks_text(odd)} diverged from the other ranks" if odd else "ranks diverged"
        subject = ranks_text(odd) if odd else "one rank"
        return RankDesyncError(
            f"{self._after}{problem}\n    " + "\n    ".join(lines),
            expected="every rank issues the same steps, evaluations and collectives in the same order",
            fix=f"look near these lines for code that only {subject} runs or skips, such as `if world.is_main:`; every "
            "rank must call each operation",
        )


def _hash_of(name: str, facts: Mapping[str, str]) -> int:
    text = "\n".join((name, *facts.values()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _mismatch_error(name: str, by_rank: Mapping[int, Mapping[str, str]]) -> RankMismatchError:
    """Return the error for the first fact that differs."""
    first = next(iter(by_rank.values()))
    fact = next(
        (key for key in first if len({facts[key] for facts in by_rank.values()}) > 1),
        next(iter(first)),
    )
    ranks_by_value: dict[str, list[int]] = {}
    for rank, facts in by_rank.items():
        ranks_by_value.setdefault(facts[fact], []).append(rank)
    lines = "".join(
        f"\n    {ranks_text(ranks)}: {value}" for value, ranks in ranks_by_value.items()
    )
    return RankMismatchError(
        f"{name}: ranks have a different {fact}{lines}",
        expected="data, their order, model, optimizer and settings are equal on every rank",
        fix="give every rank the whole dataset in one order (sort sets and listed files); samestep.loader divides it",
        code="E_RANK_BATCH" if fact in (BATCH, DATASET) else "E_RANK_SETTINGS",
    )
