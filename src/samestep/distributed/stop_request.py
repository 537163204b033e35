"""Signals that request the end of a run at the next step, and the one at the parent's end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from samestep.distributed.standard_streams import open_terminals, redirect_to_null
from samestep.errors import EXIT_STOPPED

# Terminals and batch systems send these to a whole process group to end it.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
GROUP_SIGNALS = frozenset({signal.SIGINT, *STOP_SIGNALS})
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, for any reason (Linux, prctl(2)).

    The signal also ends a process that is stopped, or in C code that holds the interpreter. If the
    parent has ended already, this process is killed at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


class StoppedLoop(SystemExit):
    """Exit of a script after its loop ended on request, after the same step on all ranks."""

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


class StopRequest:
    """Request to end the run at the next step boundary, by a signal or `samestep.request_stop`.

    The handler only sets the flag. Ranks agree on the flag inside the communication of a step, so
    all of them end after the same step.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # the first signal received
        self.is_made = False  # by the code of this rank
        self._terminals: list[int] = []
        self._process = os.getpid()

    def __call__(self) -> bool:
        return self.is_made or self.number is not None

    def install(self) -> None:
        """Install handlers of SIGTERM, SIGUSR1 and SIGHUP, for the life of the process.

        Does nothing outside the main thread, where Python allows no handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._terminals = open_terminals()
        self._process = os.getpid()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._handle)

    def handling(self, numbers: Iterable[int]) -> AbstractContextManager[None]:
        """Take signals inside a block as requests; a second SIGINT interrupts at once."""
        self._terminals = open_terminals()
        self._process = os.getpid()
        return handled_signals(numbers, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid():  # a fork has no loop to end, and others wait for its end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.number = self.number or number
        if number == signal.SIGHUP:
            redirect_to_null(self._terminals)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def handled_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals inside the block, except those that the process ignores, as under nohup.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handled = [
        number for number in numbers if is_main and signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
