"""The checkpoint interval that bounds lost work (`--max-lost-work`)."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_REMEMBERED_SAVES = 8


class CheckpointInterval:
    """Times of checkpoints that bound the work lost by a kill.

    The next checkpoint must be complete, not started, before the state of the previous one reaches the maximum age. The
    durations of steps and writes are predicted from the last step and the longest of the last few saves.

    Args:
        seconds: maximum lost work, or None for no bound.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._state_time, self._is_exceeded = clock(), False
        self._durations: deque[float] = deque(maxlen=_REMEMBERED_SAVES)

    def is_due(self, ahead: float) -> bool:
        """Return whether to save at the next opportunity; the one after that is in `ahead` seconds."""
        if self._seconds is None:
            return False
        age = self._clock() - self._state_time
        return age + ahead + max(self._durations, default=0.0) >= self._seconds

    def begin_save(self) -> None:
        """Record the start of a save of the current state."""
        self._state_time = self._clock()

    def end_save(self, seconds: float) -> bool:
        """Record the end of a save; return whether its duration exceeds the bound for the first time."""
        self._durations.append(seconds)
        was_exceeded = self._is_exceeded
        self._is_exceeded = was_exceeded or seconds > (self._seconds or math.inf)
        return self._is_exceeded and not was_exceeded
