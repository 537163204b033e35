"""A request to end at the next step boundary."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Remembers that SIGTERM arrived.

    The handler only sets a flag: ranks agree on it inside the step's own communication, so all of them end
    after the same step.
    """

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        return self._asked

    def listen(self) -> None:
        """Take over SIGTERM in this process (main thread only)."""
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
