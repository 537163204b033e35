"""Collective check: all ranks confirm that they issue the same operation before it communicates.

Operations of this package begin with a small all-reduce of a hash of their name and facts. A step that follows the
same step as before adds the step hash to its statistics instead: no message of its own. If hashes differ, ranks
exchange the texts, and every rank raises an error.

A rank that waits for others in its step cannot receive an error through the messages of the step. `OperationMonitor`, a
thread, therefore stores an operation that lasts more than a second in the job's store, and reads those of the others.

An enabled check covers collectives of the user too. Every rank numbers its operations and stores a description of each
in the job's store, then reads those of the other ranks under the same number.

Decisions: docs/decisions/rank-checks.md
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from samestep.distributed.interception import call_site, intercept_collectives
from samestep.distributed.rendezvous import wait_for_keys
from samestep.distributed.status import RankStatus, odd_ranks, ranks_text
from samestep.errors import PeerLostError, RankDesyncError, RankMismatchError

# Time for the other ranks to store their operation once two ranks differ.
_DESYNC_SECONDS = 2.0
# Less than the launcher gives to the other ranks after the first failure.
_READERS_SECONDS = 0.5
_WAIT_SECONDS = 1.0  # then an operation is stored, and the difference of pending operations is read
_HASH_BITS = 20  # sums of squares over 2**12 ranks are exact in float64
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.00005, 0.25
_RULE = "every rank issues the same steps, evaluations and collectives in the same order"
BATCH, DATASET = "global batch", "dataset"  # facts with an error code of their own
_LOST = re.compile("gloo/|connection|pair closure|timed out|timeout|broken pipe", re.IGNORECASE)
# Of a rank's text in an error; limits of its parts.
_TEXT_BYTES, _LINE_BYTES, _FACTS_BYTES = 4000, 500, 3000


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
        facts = {key: ascii(value)[1:-1][: facts_bytes // len(self.facts)] for key, value in self.facts.items()}
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
        while not self._ended.wait(_MAX_POLL_SECONDS):
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
                self._ended.wait(_MAX_POLL_SECONDS)  # for further ranks
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


@dataclass(frozen=True)
class Entry:
    """One operation that a rank is about to issue."""

    operation: str  # equal on every rank of a healthy run
    line: str  # source line of the call; ranks may call from different lines
    compared: int  # number of entries that the rank had compared before

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        """Parse the stored form."""
        compared, operation, line = data.decode().split("\n", 2)  # a path may contain a line break
        return cls(operation, line, int(compared))

    def __str__(self) -> str:
        return f"{self.operation} at {self.line}"


class CollectiveCheck:
    """Compares the operations of this rank with those of the other ranks, and after `enable` the user's collectives.

    The enabled check opens a second connection to the job's store. `rank_status` receives every operation. `at_end` is
    called at the end of the world, on every rank; its keys are references to the objects that are compared.

    Attributes:
        step_hash: hash of the current step, a term of its statistics; 0 if it has been compared already.
    """

    def __init__(self, store: dist.Store, rank_status: RankStatus, *, rank: int, size: int, timeout: timedelta) -> None:
        self._rank_status, self._rank, self._size = rank_status, rank, size
        self._job_store, self._timeout = store, timeout.total_seconds()
        self._group = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
        self._store: dist.Store | None = None
        self._restore: Callable[[], None] | None = None
        self._thread = threading.get_ident()
        self._is_inside = False
        self._engines = self.step_hash = 0
        self._after = ""  # for messages
        self._step: tuple[str, Mapping[str, str]] = "", {}
        self._monitor = OperationMonitor(store, rank=rank, size=size)
        self._previous: Hashable = None  # messages of the last step
        self._next: dict[Hashable, Hashable] = {}  # messages of the step that followed one with these messages
        self._entries: dict[int, Entry] = {}  # own entries that are in the store
        self._posted = self._compared = 0
        self.at_end: dict[Callable[[], object], Callable[[], None]] = {}

    def enable(self, key: int) -> None:
        """Start to compare operations; `key` is equal on every rank, and different for every use of the same store."""
        if self._size > 1 and self._store is None:
            self._store = dist.PrefixStore(f"samestep/collective-check/{key}", self._job_store.clone())  # type: ignore[attr-defined]
            self._restore = intercept_collectives(self._is_active, self._on_collective)

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Disable the check at the end of the block. The end itself is an operation of all ranks."""
        try:
            yield
            with self.operation("end of samestep.start()"):
                for compare in self.at_end.values():
                    compare()
        finally:
            if self._restore is not None:
                self._restore()
            self._store = self._restore = None
            self._monitor.end()
            self.at_end.clear()

    def next_engine_name(self) -> str:
        """Return `engine`, then `engine 2` for the second engine of a world."""
        self._engines += 1
        return "engine" if self._engines == 1 else f"engine {self._engines}"

    @contextmanager
    def operation(
        self, name: str, facts: Mapping[str, str] | None = None, *, messages: Hashable = None
    ) -> Iterator[None]:
        """Check an operation of all ranks, with facts that are equal on all; collectives in the block belong to it.

        A step whose `messages` follow those of the step before as last time begins without a comparison: the block adds
        `step_hash` to its own messages, and calls `confirm` with the sums. `messages` stands for their number and
        length. If ranks are about to send messages of different lengths, at least one compares first.

        Raises:
            RankDesyncError: ranks issue different operations, or a rank issues none.
            RankMismatchError: facts differ.
            PeerLostError: another rank is gone.
        """
        is_outermost = not self._is_inside
        with self._rank_status.operation(name):
            if is_outermost and self._store is not None:
                self._post(self._store, name)
                with self._rank_status.waiting("the collective check"):
                    self._compare(self._store)
            self._is_inside = True
            try:
                if is_outermost:
                    self._begin(name, facts or {}, messages)
                yield
            except PeerLostError as error:  # perhaps it ended because of the difference
                self._raise_difference(error)
                raise
            finally:
                self._is_inside = not is_outermost
                if is_outermost:
                    self._monitor.finish()
                    self.step_hash = 0

    def _begin(self, name: str, facts: Mapping[str, str], messages: Hashable) -> None:
        follows = messages is not None and self._next.get(self._previous) == messages
        if messages is not None:
            self._next[self._previous] = self._previous = messages
        if follows and self._size > 1:
            self._monitor.begin(name, facts)
            self._step, self.step_hash = (name, facts), _hash_of(name, facts) >> (56 - _HASH_BITS)
        else:
            self.agree(name, facts)
        self._after = f"after {name}, "

    def confirm(self, total: float, squares: float) -> None:
        """Compare the current step by the sums of `step_hash` and of its squares over all ranks.

        The squared differences from the hash of a rank add up to zero only if all hashes are equal.

        Raises:
            RankDesyncError: as `operation`.
            RankMismatchError: as `operation`.
        """
        if (total, squares) != (self._size * self.step_hash, self._size * self.step_hash**2):
            self.agree(*self._step)

    def begin_collective(self, name: str) -> None:
        """Check a collective of the user that is called through this package; an enabled check covers it already."""
        if not self._is_inside and self._store is None and threading.get_ident() == self._thread:
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
        rows = [PendingOperation.from_text(bytes(row.tolist()).rstrip(b"\0")) for row in self._rows(own)]
        raise self._difference(dict(enumerate(rows)))

    def _difference(self, rows: Mapping[int, PendingOperation]) -> RankDesyncError | RankMismatchError:
        """Return the error for names, source lines and facts that differ between ranks."""
        names = {row.name for row in rows.values()}
        if len(names) > 1:
            return self._desync_error({rank: Entry(row.name, row.line, 0) for rank, row in rows.items()})
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
                    time.sleep(_MAX_POLL_SECONDS)
                work.wait()
        return rows

    @contextmanager
    def _gloo_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(error):  # such as an error of a worker of a loader, raised by a signal handler
                raise
            raise PeerLostError(f"rank {self._rank} lost its connection to another rank: {error}") from error

    def _is_active(self) -> bool:
        """Whether a collective is the user's: not inside an operation, and not in another thread."""
        return not self._is_inside and threading.get_ident() == self._thread and self._store is not None

    def _on_collective(self, description: str, is_blocking: bool) -> None:
        assert self._store is not None
        self._post(self._store, description)
        # After an asynchronous call this rank may be needed elsewhere before the others call: compare next time.
        if is_blocking:
            self._compare(self._store)

    def _post(self, store: dist.Store, operation: str) -> None:
        self._posted += 1
        entry = self._entries[self._posted] = Entry(operation, call_site(), self._compared)
        with self._store_errors():
            store.set(f"{self._posted}/{self._rank}", f"{entry.compared}\n{entry.operation}\n{entry.line}")

    def _compare(self, store: dist.Store) -> None:
        with self._store_errors():
            while self._compared < self._posted:
                number = self._compared + 1
                entries = self._read(store, number)
                if len({entry.operation for entry in entries.values()}) > 1:
                    self._wait_for_readers(store)
                    raise self._desync_error(entries)
                self._compared = number
            # No rank reads an entry after its comparison, so the store holds only a few entries per rank.
            done = min(entry.compared for entry in entries.values())
            for number in [number for number in self._entries if number <= done]:
                del self._entries[number]
                store.delete_key(f"{number}/{self._rank}")

    def _read(self, store: dist.Store, number: int) -> dict[int, Entry]:
        """Return the entries of all ranks; if ranks differ already, of those that have stored one."""
        keys = {rank: f"{number}/{rank}" for rank in range(self._size) if rank != self._rank}
        began = time.monotonic()
        # No blocking read: torch prints warnings when one ends without an answer.
        while not store.check(list(keys.values())):
            waited = time.monotonic() - began
            if waited > min(_DESYNC_SECONDS, self._timeout):
                present = [rank for rank, key in keys.items() if store.check([key])]
                entries = self._fetch(store, keys, present, number)
                if len({entry.operation for entry in entries.values()}) > 1:
                    return entries
                if waited > self._timeout:
                    self._wait_for_readers(store)
                    raise self._missing_error(store, [rank for rank in keys if rank not in present], number)
            time.sleep(min(max(waited / 8, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS))
        return self._fetch(store, keys, list(keys), number)

    def _fetch(self, store: dist.Store, keys: dict[int, str], ranks: list[int], number: int) -> dict[int, Entry]:
        values = store.multi_get([keys[rank] for rank in ranks]) if ranks else []
        entries = {rank: Entry.from_bytes(value) for rank, value in zip(ranks, values, strict=True)}
        return dict(sorted({**entries, self._rank: self._entries[number]}.items()))

    def _wait_for_readers(self, store: dist.Store) -> None:
        """Give the other ranks a moment to read the same entries: the store may end with rank 0's process."""
        store.set(f"seen/{self._rank}", "")
        if self._rank == 0:
            wait_for_keys(store, [f"seen/{rank}" for rank in range(self._size)], _READERS_SECONDS)

    def _desync_error(self, entries: dict[int, Entry]) -> RankDesyncError:
        odd = odd_ranks({rank: entry.operation for rank, entry in entries.items()})
        missing = [rank for rank in range(self._size) if rank not in entries]
        ranks_by_entry: dict[str, list[int]] = {}
        for rank in sorted(entries, key=lambda rank: (rank not in odd, rank)):
            ranks_by_entry.setdefault(str(entries[rank]), []).append(rank)
        lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_by_entry.items()]
        lines += [f"{ranks_text(missing)}: no operation yet"] if missing else []
        problem = f"{ranks_text(odd)} diverged from the other ranks" if odd else "ranks diverged"
        subject = ranks_text(odd) if odd else "one rank"
        return RankDesyncError(
            f"{self._after}{problem}\n    " + "\n    ".join(lines),
            expected=_RULE,
            fix=f"look near these lines for code that only {subject} runs or skips, such as `if world.is_main:`; every "
            "rank must call each operation",
        )

    def _missing_error(self, store: dist.Store, missing: list[int], number: int) -> RankDesyncError:
        lines = []
        for rank in missing:
            last = next((n for n in range(number - 1, 0, -1) if store.check([f"{n}/{rank}"])), 0)
            operation = str(Entry.from_bytes(store.get(f"{last}/{rank}"))) if last else "none"
            lines.append(f"last operation of rank {rank}: {operation}")
        return RankDesyncError(
            f"{self._after}{ranks_text(missing)} did not reach {self._entries[number]} within "
            f"{self._timeout:g} s\n    " + "\n    ".join(lines),
            expected=_RULE,
            fix="look after that line for a wait; samestep.start(timeout=...) sets a longer limit",
            code="E_RANK_MISSING",
        )

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise PeerLostError(f"rank {self._rank} lost its connection to the store of the job: {error}") from error


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether an error of a backend is the loss of another rank; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and bool(_LOST.search(str(error))))


def _hash_of(name: str, facts: Mapping[str, str]) -> int:
    text = "\n".join((name, *facts.values()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _mismatch_error(name: str, by_rank: Mapping[int, Mapping[str, str]]) -> RankMismatchError:
    """Return the error for the first fact that differs."""
    first = next(iter(by_rank.values()))
    fact = next((key for key in first if len({facts[key] for facts in by_rank.values()}) > 1), next(iter(first)))
    ranks_by_value: dict[str, list[int]] = {}
    for rank, facts in by_rank.items():
        ranks_by_value.setdefault(facts[fact], []).append(rank)
    lines = "".join(f"\n    {ranks_text(ranks)}: {value}" for value, ranks in ranks_by_value.items())
    return RankMismatchError(
        f"{name}: ranks have a different {fact}{lines}",
        expected="data, their order, model, optimizer and settings are equal on every rank",
        fix="give every rank the whole dataset in one order (sort sets and listed files); samestep.loader divides it",
        code="E_RANK_BATCH" if fact in (BATCH, DATASET) else "E_RANK_SETTINGS",
    )
