"""A request to end at the next step boundary."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

# What terminals and batch systems send to a whole group of processes to have it end; the ranks' launcher decides.
REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
GROUP_SIGNALS = frozenset({signal.SIGINT, *REQUESTS})


class StopRequest:
    """Remembers that SIGTERM, SIGUSR1 or SIGHUP arrived.

    The handler only sets a flag: ranks agree on it inside the step's own communication, so all of them end
    after the same step.

    Attributes:
        number: the signal that arrived first, if one did.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._terminals: list[int] = []

    def __call__(self) -> bool:
        return self.number is not None

    def listen(self) -> None:
        """Take over these signals in this process; outside the main thread they are somebody else's."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._terminals = terminals()
        for number in REQUESTS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if number == signal.SIGHUP:
            leave_terminals(self._terminals)


def terminals() -> list[int]:
    """Which of standard output and error are terminals."""
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


def leave_terminals(descriptors: list[int]) -> None:
    """Send what goes to terminals that have gone away to nowhere: printing must not fail a run that is to end well."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)
