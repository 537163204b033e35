"""Per-rank status in shared memory, readable by the launcher; texts and majorities of ranks.

A rank writes a few numbers and a line of text into a slot when an operation of all ranks begins or
ends: some microseconds per step. Reading needs no cooperation, so the last status of a rank that
hangs, was stopped or crashed remains visible.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.reduction import DupFd
from typing import Any, TypeVar

# Odd while the slot is being written. The same even number before and after a read proves a
# consistent read.
_VERSION = struct.Struct("<Q")
# The fields of StatusSnapshot in order, then the length of the text.
_NUMBERS = struct.Struct("<QdQ????H")
_TEXT_BYTES = 160
_SLOT_BYTES = 256
# Precedes a disk operation in an activity.
DISK_OPERATION = ", disk: "
Key = TypeVar("Key", bound=Hashable)
assert _VERSION.size + _NUMBERS.size + _TEXT_BYTES <= _SLOT_BYTES


@dataclass(frozen=True)
class StatusSnapshot:
    """Status of one rank at one moment."""

    operations: int = 0  # operations of all ranks that the rank has begun; equal on healthy ranks
    last_change: float = 0.0  # monotonic clock of the machine in seconds, at the last change
    steps: int = 0  # steps of optimizers since the start of the process
    is_waiting: bool = False  # for other ranks
    is_finished: bool = False  # the rank has left `samestep.init()`
    is_script: bool = False  # the rank runs a script, not a function
    is_resting: bool = False  # in code of a plain loop between its calls, which takes any time
    activity: str = ""  # such as `in step 7`


class RankStatus:
    """Writer of one rank's slot."""

    is_preparing = False  # in a block of `samestep.main_first`
    is_free = False  # the rank rests between operations and waits, as a plain loop does
    # Called with a name when a wait for other ranks begins, in the waiting thread. The returned
    # function is called at the end of the wait.
    on_wait: Callable[[str], Callable[[], None]] | None = None

    def __init__(self, memory: Any, rank: int) -> None:
        self._memory = memory
        self._offset = rank * _SLOT_BYTES
        self._lock = threading.Lock()  # communication has a thread of its own
        self._version = 0
        self._is_inside = False
        self._shows_steps = False
        self._values: dict[str, Any] = asdict(StatusSnapshot())  # a dataclass costs more per change
        self._waits: list[str] = []
        self._disk_operation = ""
        self._wait_began = self._waited_seconds = 0.0

    @property
    def waited_seconds(self) -> float:
        """Total time in which at least one thread of this rank waited for other ranks."""
        with self._lock:
            if self._waits:
                return self._waited_seconds + time.monotonic() - self._wait_began
            return self._waited_seconds

    @property
    def activity(self) -> str:
        """Current activity without waits, such as `in step 7`; empty before the first operation."""
        activity: str = self._values["activity"]
        return activity

    @property
    def snapshot(self) -> StatusSnapshot:
        """Current status as other processes read it."""
        return _read(self._memory, self._offset)

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Record an operation of all ranks during the block, unless it is inside another one."""
        if self._is_inside:
            yield
            return
        self._is_inside = True
        # A process may enter a second world after the end of the first.
        number = self._values["operations"] + 1
        activity = f"in {name}"
        self._update(operations=number, activity=activity, is_finished=False, is_resting=False)
        try:
            yield
        finally:
            self._is_inside = False
        # An exception skips this line: the activity stays that of the failure.
        self._update(activity=f"after {name}", **self._rest(is_resting=True))

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Record a wait for other ranks during the block."""
        with self._lock:
            if not self._waits:
                self._wait_began = time.monotonic()
            self._waits.append(name)
        self._update(**self._rest(is_resting=False))
        end = self.on_wait(name) if self.on_wait is not None else None
        try:
            yield
        finally:
            if end is not None:
                end()
            with self._lock:
                self._waits.remove(name)
                if not self._waits:
                    self._waited_seconds += time.monotonic() - self._wait_began
                is_resting = not self._waits and not self._is_inside
            self._update(**self._rest(is_resting=is_resting))

    def _rest(self, *, is_resting: bool) -> dict[str, bool]:
        if self.is_free:
            return {"is_resting": is_resting}
        return {}

    def end_step(self) -> None:
        """Count a step of an optimizer."""
        steps = self._values["steps"] + 1
        changes = {"steps": steps}
        if self._shows_steps:
            changes["activity"] = f"after optimizer step {steps}"
        self._update(**changes)

    def heartbeat(self) -> None:
        """Record progress inside a long operation."""
        self._update()

    def show_disk_operation(self, text: str) -> None:
        """Record the disk operation in progress, such as `fsync of PATH`; empty without one."""
        self._disk_operation = text
        self._update()

    def begin_script(self) -> None:
        """Record that this rank runs a script."""
        self._update(is_script=True)

    def show_steps(self) -> None:
        """Record steps of optimizers as activity, for a script without operations of all ranks."""
        self._shows_steps = True
        self._update(activity="before the first optimizer step")

    def finish(self) -> None:
        """Record the end of `samestep.init()`; the rank is not watched until its next operation."""
        self._update(is_finished=True, activity="after the end of samestep.init()")

    def _update(self, **changes: Any) -> None:
        with self._lock:
            values = self._values
            waits = self._waits
            values.update(changes, last_change=time.monotonic(), is_waiting=bool(waits))
            *numbers, text = values.values()
            if waits:
                text = f"{text}, waiting in {waits[-1]}"
            if self._disk_operation:
                # Last: the reader takes the rest of the activity for the operation.
                text += DISK_OPERATION + self._disk_operation
            encoded = text.encode()[:_TEXT_BYTES]
            # Written at once: `pack_into` zeroes the target first, and a concurrent reader would
            # see the zeros.
            memory = self._memory
            start = self._offset + _VERSION.size
            self._version += 2
            memory[self._offset : start] = _VERSION.pack(self._version - 1)
            memory[start : start + _NUMBERS.size + len(encoded)] = (
                _NUMBERS.pack(*numbers, len(encoded)) + encoded
            )
            memory[self._offset : start] = _VERSION.pack(self._version)


def local_rank_status() -> RankStatus:
    """Return a status in private memory, for a process without a launcher that reads it."""
    return RankStatus(bytearray(_SLOT_BYTES), 0)


class WaitClock:
    """Total time of the waits of one thread, in seconds; other threads may read it."""

    def __init__(self) -> None:
        # One attribute: other threads read both values at once.
        self._waits: tuple[float, float | None] = (0.0, None)
        self.last = 0.0  # most recent wait

    @property
    def seconds(self) -> float:
        """Total, including a wait in progress."""
        total, began = self._waits
        if began is None:
            return total
        return total + time.perf_counter() - began

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Time a wait."""
        total = self.seconds
        began = time.perf_counter()
        self._waits = total, began
        try:
            yield
        finally:
            self.last = time.perf_counter() - began
            self._waits = total + self.last, None


class StatusBoard:
    """Slots of `size` ranks. A board can be passed to a process that is being started.

    The slots are in an unnamed file, which is released with its last descriptor.
    """

    def __init__(self, size: int) -> None:
        descriptor = unnamed_file("samestep-board")
        os.ftruncate(descriptor, size * _SLOT_BYTES)
        self._map(descriptor, size)

    def _map(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._memory = mmap.mmap(descriptor, size * _SLOT_BYTES)

    def __getstate__(self) -> tuple[Any, int]:
        return DupFd(self._descriptor), self._size

    def __setstate__(self, state: tuple[Any, int]) -> None:
        handle, size = state
        self._map(handle.detach(), size)

    def rank_status(self, rank: int) -> RankStatus:
        """Return the writer of a rank's slot."""
        return RankStatus(self._memory, rank)

    def read(self, rank: int) -> StatusSnapshot:
        """Return the status of a rank."""
        return _read(self._memory, rank * _SLOT_BYTES)

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self._descriptor)


def _read(memory: Any, offset: int) -> StatusSnapshot:
    start = offset + _VERSION.size
    for _ in range(100):
        (version,) = _VERSION.unpack_from(memory, offset)
        *numbers, length = _NUMBERS.unpack_from(memory, start)
        text = bytes(memory[start + _NUMBERS.size : start + _NUMBERS.size + length])
        if version % 2 == 0 and _VERSION.unpack_from(memory, offset)[0] == version:
            break
        time.sleep(0.0001)  # the writing rank may need this very processor
    # A rank killed during a write leaves a half-written slot; the numbers are still useful.
    return replace(StatusSnapshot(*numbers), activity=text.decode(errors="replace"))


def unnamed_file(title: str) -> int:
    """Return a descriptor of a new file without a name, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(title)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 2`, or `ranks 0, 1 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def odd_ranks(values: Mapping[int, Hashable]) -> list[int]:
    """Return the ranks with another value than a strict majority; empty without one."""
    for value, count in Counter(values.values()).most_common(1):
        if 2 * count > len(values):
            return [rank for rank, other in values.items() if other != value]
    return []


def ranks_by_value(values: Mapping[int, Key], first: Sequence[int]) -> dict[Key, list[int]]:
    """Group ranks by value; the ranks in `first` come first."""
    groups: dict[Key, list[int]] = {}
    for rank in sorted(values, key=lambda rank: (rank not in first, rank)):
        groups.setdefault(values[rank], []).append(rank)
    return groups
