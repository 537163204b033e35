"""Signals that stop a launch: forwarded to the workers, which have a grace time to end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

from samestep.distributed.standard_streams import open_terminals, redirect_to_null, report_line
from samestep.distributed.stop_request import STOP_SIGNALS, handled_signals


class StopSignals:
    """Stop signals of the command.

    The first one requests the end of the run after a step, and begins the grace time. A second
    Ctrl-C kills the workers.

    Attributes:
        count: number of signals.
        first: the first of them.
        deadline: time at which the grace time is over.

    Args:
        grace: seconds that workers have to end; None: no limit.
        forward: sends the request to all workers.
        kill: kills all workers.
    """

    def __init__(
        self, grace: float | None, forward: Callable[[], None], kill: Callable[[], None]
    ) -> None:
        self.count = 0
        self.first: int | None = None
        self.deadline = float("inf")
        self._grace = grace
        self._forward = forward
        self._kill = kill
        self._terminals = open_terminals()

    def handled(self) -> AbstractContextManager[None]:
        """Handle stop signals during the block, if in the main thread."""
        return handled_signals((signal.SIGINT, *STOP_SIGNALS), self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number
        if number == signal.SIGHUP:
            redirect_to_null(self._terminals)
        if self.count > 1 and number == signal.SIGINT:
            self._kill()
            return
        self._forward()
        if self._grace is not None and self.deadline == float("inf"):
            self.deadline = time.monotonic() + self._grace
        if number == signal.SIGINT:
            report_line("\nstopping; press Ctrl-C again to stop at once")
