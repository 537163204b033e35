"""One standard input for all ranks: rank 0 reads, the others receive what it has read.

Descriptor 0 of a rank is that of the launcher, in the same process group, although
`multiprocessing` has given the null device to `sys.stdin`.
"""

from __future__ import annotations

import bdb
import getpass
import io
import locale
import os
import pdb
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

from samestep.errors import InputError
from samestep.script.replaced import replaced
from samestep.view.in_step import script_line

Share = Callable[[bytes | None], bytes]
# Until rank 0 has input, ranks exchange an empty message after this time, so that none of them
# counts as hung.
_PATIENCE_SECONDS = 20.0
# First byte of a message.
_DATA = b"+"
_OS_ERROR = b"!"
_END = b"."


class _Console:
    """Standard input of rank 0, as one of the ranks sees it.

    Args:
        rank: this rank.
        share: a collective of the main thread that returns the bytes of rank 0; other ranks give
            None.
    """

    def __init__(self, rank: int, share: Share) -> None:
        self._is_reader = rank == 0
        self._share = share
        self._process = os.getpid()
        self._getpass = getpass.getpass
        self.is_terminal = bool(self.receive(lambda: b"y" * os.isatty(0)))

    def receive(self, read: Callable[[], bytes | None]) -> bytes:
        """Return what `read` returns on rank 0, or raise its error; None means not yet."""
        if (
            os.getpid() != self._process
            or threading.current_thread() is not threading.main_thread()
        ):
            raise _refusal("standard input is read in a thread or a child process")
        message = b""
        while not message:
            message = self._share(_message(read) if self._is_reader else None)
        if message[:1] == _OS_ERROR:
            raise OSError(message[1:].decode())
        if message[:1] == _END:
            raise EOFError(message[1:].decode())
        return message[1:]

    def getpass(self, *arguments: Any, **options: Any) -> str:
        """Return the password that rank 0 has asked for at the terminal, or else a line of the shared input."""
        if not self.receive(_has_terminal):
            return getpass.fallback_getpass(*arguments, **options)  # type: ignore[attr-defined, no-any-return]
        return self.receive(lambda: self._getpass(*arguments, **options).encode()).decode()


def _message(read: Callable[[], bytes | None]) -> bytes:
    try:
        data = read()
    except OSError as error:
        return _OS_ERROR + str(error).encode()
    except EOFError as error:
        return _END + str(error).encode()
    if data is None:
        return b""
    return _DATA + data


def _has_terminal() -> bytes:
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        return b"y"
    return b""


class _SharedInput(io.RawIOBase):
    """Bytes of standard input; text streams above it also serve `input`, which finds no descriptor."""

    def __init__(self, console: _Console) -> None:
        self._console = console

    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._console.is_terminal

    def fileno(self) -> int:
        raise io.UnsupportedOperation(
            "standard input of several processes has no descriptor: use --processes 1"
        )

    def readinto(self, buffer: Any) -> int:
        def read() -> bytes | None:
            is_ready = select.select([0], [], [], _PATIENCE_SECONDS)[0]
            if is_ready:
                return os.read(0, len(buffer))
            return None

        data = self._console.receive(read)
        buffer[: len(data)] = data
        return len(data)


def _refusal(problem: str) -> InputError:
    file, line = script_line(sys._getframe(1))
    return InputError(
        f"{file}:{line}: {problem}, in a script on several processes",
        expected="one reader of standard input, in the main thread of each process",
        fix="samestep run --processes 1",
        code="E_LAUNCH",
    )


def _refuse_debugger(*_: Any, **__: Any) -> NoReturn:
    raise _refusal("a debugger")


@contextmanager
def shared_console(rank: int, size: int, share: Share) -> Iterator[None]:
    """Give the standard input of the launcher to the script, inside the block.

    `input`, `sys.stdin` and `getpass.getpass` return the same on all ranks; debuggers end with an
    `InputError`. On one process everything is as in plain Python.

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
    console = _Console(rank, share)
    stream = io.TextIOWrapper(io.BufferedReader(_SharedInput(console)), locale.getencoding())
    with ExitStack() as stack:
        if rank > 0:
            stack.enter_context(_without_input())
        stack.enter_context(replaced(sys, stdin=stream))
        stack.enter_context(replaced(getpass, getpass=console.getpass))
        stack.enter_context(replaced(bdb.Bdb, set_trace=_refuse_debugger))
        stack.enter_context(replaced(pdb.Pdb, interaction=_refuse_debugger))
        yield


@contextmanager
def _without_input() -> Iterator[None]:
    """Give the null device to descriptor 0, which subprocesses inherit: they would take input of rank 0."""
    before = os.dup(0)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)
