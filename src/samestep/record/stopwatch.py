"""Where the time of a training loop goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds spent waiting for data and on steps.

    Attributes:
        last_wait: seconds that the loop last waited for data.
        last_step: seconds of the last step, its wait included.
        last_speed: samples a second of the last step, its wait included.
        own_samples: samples that this rank has computed.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._samples, self._busy = 0, 0.0
        self._waits: tuple[float, float | None] = 0.0, None  # in one piece, as other threads read it
        self.last_wait, self.last_step, self.last_speed = 0.0, 0.0, 0.0
        self.own_samples = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the watch was made."""
        return time.perf_counter() - self._began

    @property
    def speed(self) -> float:
        """Samples a second over all steps and waits; 0 before the first."""
        return self._samples / self._busy if self._busy else 0.0

    @property
    def waited(self) -> float:
        """Seconds spent waiting for data, those of a wait that goes on among them."""
        before, since = self._waits
        return before if since is None else before + time.perf_counter() - since

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the wait for a batch."""
        began = time.perf_counter()
        self._waits = self.waited, began
        try:
            yield
        finally:
            self.last_wait = time.perf_counter() - began
            self._waits = self.waited, None

    @contextmanager
    def training(self, samples: int, own: int = 0) -> Iterator[None]:
        """Time a step over `samples` samples, of which this rank computes `own`."""
        began = time.perf_counter()
        yield
        self.own_samples += own
        self.last_step = self.last_wait + time.perf_counter() - began
        self._samples += samples
        self._busy += self.last_step
        self.last_speed = samples / self.last_step
