"""When a save is due so that a kill at any moment costs no more than so many seconds of work."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_REMEMBERED = 8


class LossBound:
    """Asks for saves early enough.

    A kill just before a checkpoint is on the disk takes back the run to the one before. So the next one must be there,
    not begun, before the state of the last one is so old: steps and writing take their time, which is foretold by
    the last step and the longest of the last few saves. Before the first save nothing is known of saves.

    Args:
        seconds: what may be lost at most, or None for no bound.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._state_time, self._is_broken = clock(), False
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)

    def is_due(self, ahead: float) -> bool:
        """Whether to save at the next chance; the one after it comes in `ahead` seconds from now."""
        if self._seconds is None:
            return False
        age = self._clock() - self._state_time
        return age + ahead + max(self._durations, default=0.0) >= self._seconds

    def begin_save(self) -> None:
        """The state of this moment is being saved."""
        self._state_time = self._clock()

    def end_save(self, seconds: float) -> bool:
        """A save is on the disk, so many seconds after the moment whose state it holds.

        Returns:
            Whether that alone, for the first time, took longer than what may be lost.
        """
        self._durations.append(seconds)
        was_broken, self._is_broken = self._is_broken, self._is_broken or seconds > (self._seconds or math.inf)
        return self._is_broken and not was_broken
