"""Standard input of a script: rank 0 reads, the others receive what it has read.

Descriptor 0 of a rank is that of the launcher, in the same process group, although
`multiprocessing` has given the null device to `sys.stdin`.
"""

from __future__ import annotations

import io
import locale
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from samestep.script.patches import is_main_thread_of, replaced
from samestep.script.refusals import terminal_refusal

Share = Callable[[bytes | None], bytes]


class _SharedInput(io.RawIOBase):
    """Bytes of standard input of rank 0, as one of the ranks sees them; no terminal.

    Text streams above it also serve `input`, which finds no descriptor.

    Args:
        rank: this rank.
        share: a collective of the main thread that returns the bytes of rank 0; other ranks give
            None.
    """

    def __init__(self, rank: int, share: Share) -> None:
        self._is_reader = rank == 0
        self._share = share
        self._process = os.getpid()

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        problem = "standard input of several processes has no descriptor: use --processes 1"
        raise io.UnsupportedOperation(problem)

    def readinto(self, buffer: Any) -> int:
        if not is_main_thread_of(self._process):
            raise terminal_refusal("standard input is read in a thread or a child process")
        own = None
        if self._is_reader:
            own = os.read(0, len(buffer))
        data = self._share(own)
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def shared_console(rank: int, size: int, share: Share) -> Iterator[None]:
    """Give the standard input of the launcher to the script, inside the block.

    `input` and `sys.stdin` return the same on all ranks. On one process everything is as in plain
    Python.

    Args:
        rank: this rank.
        size: number of ranks.
        share: returns the bytes that rank 0 gives, on all ranks, which call it in the same order;
            others give None.
    """
    if size == 1:
        with open(0, encoding=locale.getencoding(), closefd=False) as own, replaced(sys, stdin=own):
            yield
        return
    shared = io.BufferedReader(_SharedInput(rank, share))
    stream = io.TextIOWrapper(shared, locale.getencoding())
    with ExitStack() as stack:
        if rank > 0:
            stack.enter_context(_without_input())
        stack.enter_context(replaced(sys, stdin=stream))
        yield


@contextmanager
def _without_input() -> Iterator[None]:
    """Give the null device to descriptor 0: subprocesses would take input of rank 0."""
    before = os.dup(0)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)
