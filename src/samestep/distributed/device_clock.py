"""Time of a step in which a device computes for its rank alone.

The host of a GPU queues work and waits later, so its clock cannot show which GPU is slow: the
others wait for it in their exchanges, on the device too. Events before and after each exchange
leave these waits out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_STEPS = (
    16  # one of so many is measured: events of all exchanges cost about a percent of a short step
)


class DeviceClock:
    """Clock of the work that one thread, the creating one, gives to a device.

    Exchanges that torch issues by itself, as FSDP2's hooks do, count as work of the rank.

    Args:
        event: function that returns a new event of the device, with times.
        steps: one of so many steps is measured.
    """

    def __init__(self, event: Callable[[], Any], steps: int = _STEPS) -> None:
        self._event = event
        self._steps = steps
        self._step = 0
        self._thread = threading.get_ident()
        self._is_measuring = False
        self._begin: Any = None  # event after the last exchange
        self._spans: list[tuple[Any, Any]] = []  # of a measured step
        self._seconds: float | None = None

    def begin_exchange(self) -> None:
        """Record the end of own work."""
        if self._begin is not None and threading.get_ident() == self._thread:
            self._spans.append((self._begin, self._recorded()))
            self._begin = None

    def end_exchange(self) -> None:
        """Record the beginning of own work."""
        if self._is_measuring and threading.get_ident() == self._thread:
            self._begin = self._recorded()

    def end_step(self) -> float | None:
        """Return the seconds of own work in the last step that was measured and is over on the device, if any."""
        self.begin_exchange()
        self._is_measuring = False
        if self._spans and self._spans[-1][1].query():  # without a wait
            self._seconds = sum(begin.elapsed_time(end) for begin, end in self._spans) / 1e3
            self._spans = []
        self._step += 1
        if self._step % self._steps == 0 and not self._spans:
            self._is_measuring = True
            self.end_exchange()
        return self._seconds

    def _recorded(self) -> Any:
        event = self._event()
        event.record()
        return event
