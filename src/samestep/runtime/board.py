"""What each rank is doing, in memory that its launcher sees too.

A rank writes a few numbers and a line of text into its own slot whenever it begins or ends something that ranks do
together: some microseconds a step. Whoever reads needs nothing from the rank, so one that hangs, was stopped by a
signal or has crashed is seen as it stood.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.reduction import DupFd
from typing import Any

# Odd while the slot is being written: who reads the same even number before and after has read what belongs together.
_VERSION = struct.Struct("<Q")
# begun, since, steps, own_seconds, shards, saved, waits, over, length of the text
_NUMBERS = struct.Struct("<QdQdQq??H")
_TEXT = 160
_SLOT = 256
assert _VERSION.size + _NUMBERS.size + _TEXT <= _SLOT


@dataclass(frozen=True)
class Position:
    """Where one rank stands.

    Attributes:
        begun: how many things it has begun that ranks do together: the same on all of them, if all is well.
        since: the machine's monotonic clock, in seconds, when it last began, ended or reached something.
        steps: steps done since it was started.
        own_seconds: time spent on its own share of those steps: waiting for data, forward, and backward except for
            what overlaps with communication.
        shards: shards computed in that time.
        saved: checkpoints that this rank has written.
        waits: it has done its part and waits for the others.
        is_over: it has left `samestep.start()`.
        text: what it does, such as `in engine.step 7`.
    """

    begun: int = 0
    since: float = 0.0
    steps: int = 0
    own_seconds: float = 0.0
    shards: int = 0
    saved: int = 0
    waits: bool = False
    is_over: bool = False
    text: str = ""


class Pulse:
    """One rank's slot, as that rank writes it.

    Attributes:
        on_wait: called with its name when a wait for the others begins, in the thread that waits; what it returns is
            called when the wait is over. None where nobody listens.
    """

    on_wait: Callable[[str], Callable[[], None]] | None = None

    def __init__(self, memory: Any, rank: int) -> None:
        self._memory, self._offset = memory, rank * _SLOT
        self._lock = threading.Lock()  # communication has a thread of its own
        self._version = 0
        self._is_inside = False
        self._own_since = time.monotonic()
        self._begun = self._steps = self._shards = self._saved = 0
        self._own_seconds = 0.0
        self._is_over = False
        self._text = ""
        self._waiting: list[str] = []
        self._waiting_since = self._waited_seconds = 0.0

    @property
    def waited_seconds(self) -> float:
        """How long it has waited for the others so far, where any of its threads did."""
        with self._lock:
            return self._waited_seconds + (time.monotonic() - self._waiting_since if self._waiting else 0.0)

    @property
    def text(self) -> str:
        """What this rank does, such as `in engine.step 7`; empty before it does anything."""
        return self._text

    @property
    def position(self) -> Position:
        """Where this rank stands."""
        return _read(self._memory, self._offset)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """The outermost thing that ranks do together while the block runs; what is inside it has no name."""
        if self._is_inside:
            yield
            return
        self._is_inside = True
        self._begun += 1
        self._show(f"in {what}")
        try:
            yield
        finally:
            self._is_inside = False
        self._own_since = time.monotonic()
        self._show(f"after {what}")  # not where it raised: what is told then is where

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """This rank waits for the others while the block runs."""
        with self._lock:
            if not self._waiting:
                self._waiting_since = time.monotonic()
            self._waiting.append(what)
        self._show()
        end = self.on_wait(what) if self.on_wait is not None else None
        try:
            yield
        finally:
            if end is not None:
                end()
            with self._lock:
                self._waiting.remove(what)
                if not self._waiting:
                    self._waited_seconds += time.monotonic() - self._waiting_since
            self._show()

    def arrive(self, shards: int) -> None:
        """This rank has computed its shards of the step, save for what goes on beside communication."""
        self._own_seconds += time.monotonic() - self._own_since
        self._shards += shards
        self._steps += 1
        self._show()

    def tick(self) -> None:
        """This rank is getting on with something long."""
        self._show()

    def save(self) -> None:
        """A checkpoint is there."""
        self._saved += 1
        self._show()

    def end(self) -> None:
        """What this rank does from here on is its own business."""
        self._is_over = True
        self._show("after the end of samestep.start()")

    def _show(self, text: str | None = None) -> None:
        with self._lock:
            self._text = self._text if text is None else text
            shown = ", waiting in ".join([self._text, *self._waiting[-1:]]).encode()[:_TEXT]
            numbers = _NUMBERS.pack(
                self._begun,
                time.monotonic(),
                self._steps,
                self._own_seconds,
                self._shards,
                self._saved,
                bool(self._waiting),
                self._is_over,
                len(shown),
            )
            self._number(self._version + 1)
            _copy(self._memory, self._offset + _VERSION.size, numbers + shown)
            self._version += 2
            self._number(self._version)

    def _number(self, version: int) -> None:
        _copy(self._memory, self._offset, _VERSION.pack(version))


def own_pulse() -> Pulse:
    """The pulse of a process that has no launcher of ours to read it."""
    return Pulse(bytearray(_SLOT), 0)


class Board:
    """The slots of all ranks; it can be handed to a process that is being started.

    Args:
        descriptor: a file of `size` slots, which has no name: it is gone when nobody holds it.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size
        self._memory = mmap.mmap(descriptor, size * _SLOT)

    @classmethod
    def create(cls, size: int) -> Board:
        """A board for `size` ranks, none of which has done anything yet."""
        descriptor = nameless_file("samestep-board")
        os.ftruncate(descriptor, size * _SLOT)
        return cls(descriptor, size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._descriptor), self._size)

    def pulse(self, rank: int) -> Pulse:
        """The slot of a rank, to write."""
        return Pulse(self._memory, rank)

    def read(self, rank: int) -> Position:
        """Where a rank stands."""
        return _read(self._memory, rank * _SLOT)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
        os.close(self._descriptor)


def _copy(memory: Any, start: int, content: bytes) -> None:
    """Write bytes at once: `pack_into` first fills its place with zeros, and a reader may come just then."""
    memory[start : start + len(content)] = content


def _read(memory: Any, offset: int) -> Position:
    start = offset + _VERSION.size
    for _ in range(100):
        (version,) = _VERSION.unpack_from(memory, offset)
        *numbers, length = _NUMBERS.unpack_from(memory, start)
        text = bytes(memory[start + _NUMBERS.size : start + _NUMBERS.size + length])
        if version % 2 == 0 and _VERSION.unpack_from(memory, offset)[0] == version:
            break
        time.sleep(0.0001)  # the rank that writes may wait for this very processor
    # A rank that was killed while it wrote leaves a slot that is half new; its numbers are still of use.
    return replace(Position(*numbers), text=text.decode(errors="replace"))


def nameless_file(title: str) -> int:
    """A descriptor of a new file that no name leads to, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(title)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _received(handle: Any, size: int) -> Board:
    return Board(handle.detach(), size)
