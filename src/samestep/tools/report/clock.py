"""The time of a run: seconds since it began, without the pauses in which nobody ran it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

Floats = NDArray[numpy.float64]


class Clock:
    """Turns times of day into seconds of the run.

    Before a run is resumed, the longest time without any sign of life was a pause.

    Args:
        signs: times at which something of the run was alive, in any order.
        resumed: for each time it was resumed, when it was last heard before and when it said that it goes on.
    """

    def __init__(self, signs: Floats, resumed: Sequence[tuple[float, float]]) -> None:
        signs = numpy.unique(signs)
        self._begin = float(signs[0]) if len(signs) else 0.0
        self._end = float(signs[-1]) if len(signs) else 0.0
        ends, lengths = [], []
        for heard, goes_on in resumed:
            silent = signs[(signs >= heard) & (signs <= goes_on)]
            if len(silent) > 1:
                gaps = numpy.diff(silent)
                longest = int(gaps.argmax())
                ends.append(float(silent[longest + 1]))
                lengths.append(float(gaps[longest]))
        order = numpy.argsort(numpy.array(ends))
        self._ends = numpy.array(ends)[order]
        self._paused = numpy.concatenate([[0.0], numpy.cumsum(numpy.array(lengths)[order])])

    def __call__(self, times: Floats) -> Floats:
        """Seconds of the run; of a moment within a pause, some of its end."""
        paused = self._paused[numpy.searchsorted(self._ends, times, side="right")]
        found: Floats = numpy.maximum(times - self._begin - paused, 0.0)
        return found

    def at(self, time: float) -> float:
        """The same of one moment."""
        return float(self(numpy.array([time]))[0])

    @property
    def total(self) -> float:
        """Seconds from the first sign of life to the last, without the pauses."""
        return self.at(self._end)
