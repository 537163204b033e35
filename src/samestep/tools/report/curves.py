"""Curves of a run, reduced to a size that a page of a long run can hold."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy
from numpy.typing import NDArray

BUCKETS = 400  # minimum and maximum of each are drawn
_MEANS = 200
_NONFINITE = 50
_DIGITS = 6

Floats = NDArray[numpy.float64]


@dataclass(frozen=True)
class Series:
    """Points with ascending steps, in seconds of the run without pauses. Values can be NaN and infinite."""

    steps: NDArray[numpy.int64]
    seconds: Floats
    values: Floats

    def thinned(self, buckets: int = BUCKETS) -> Series:
        """Return the first and last finite point, and the points of the minimum and maximum of each bucket."""
        finite = numpy.flatnonzero(numpy.isfinite(self.values))
        if len(finite) > 2 * buckets:
            chosen = {0, len(finite) - 1}
            for begin, end in _buckets(len(finite), buckets):
                values = self.values[finite[begin:end]]
                chosen |= {begin + int(values.argmin()), begin + int(values.argmax())}
            finite = finite[sorted(chosen)]
        return self._at(finite)

    def means(self, buckets: int = _MEANS) -> Series:
        """Return the mean of the finite values of each bucket at its middle; no points for a short curve."""
        finite = numpy.flatnonzero(numpy.isfinite(self.values))
        bounds = _buckets(len(finite), buckets) if len(finite) > 2 * buckets else []
        middles = self._at(finite[[(begin + end) // 2 for begin, end in bounds]])
        values = [float(self.values[finite[begin:end]].mean()) for begin, end in bounds]
        return Series(middles.steps, middles.seconds, numpy.array(values))

    def data(self) -> dict[str, Any]:
        """Return `points`, `means`, a selection of `nonfinite` points, and the `nonfinite_count`, for the page."""
        indices = numpy.flatnonzero(~numpy.isfinite(self.values))
        count = len(indices)
        if count > _NONFINITE:
            indices = indices[numpy.linspace(0, count - 1, _NONFINITE).astype(int)]
        return {
            "points": self.thinned()._lists(),
            "means": self.means()._lists(),
            "nonfinite": self._at(indices)._lists(),
            "nonfinite_count": count,
        }

    def statistics(self) -> dict[str, float] | None:
        """Return `min`, `max`, `mean`, `median` and `last` of the finite values; None without any."""
        values = self.values[numpy.isfinite(self.values)]
        if not len(values):
            return None
        statistics = {"min": values.min(), "max": values.max(), "mean": values.mean(), "median": numpy.median(values)}
        return {name: float(value) for name, value in (*statistics.items(), ("last", values[-1]))}

    def _lists(self) -> dict[str, list[float]]:
        """Return steps `x`, seconds `t` and the finite values `y`; JSON has no others."""
        finite = self.values[numpy.isfinite(self.values)]
        return {"x": self.steps.tolist(), "t": _rounded(self.seconds), "y": _rounded(finite)}

    def _at(self, indices: NDArray[numpy.int64]) -> Series:
        return Series(self.steps[indices], self.seconds[indices], self.values[indices])


class Points:
    """Points of a curve in the order of a file; 24 bytes each."""

    def __init__(self) -> None:
        self._points = array("d")

    def add(self, step: int, time: float, value: float) -> None:
        """Add one point, which replaces an earlier point of the same step."""
        self._points.extend((step, time, value))

    def drop_after(self, step: int) -> None:
        """Drop the points of later steps, which a run that continues after `step` computes again."""
        points = numpy.array(self._points).reshape(-1, 3)
        self._points = array("d", points[points[:, 0] <= step].reshape(-1).tobytes())

    def series(self, clock: Callable[[Floats], Floats]) -> Series:
        """Return the last point of each step; `clock` converts Unix timestamps into seconds of the run."""
        steps, times, values = numpy.array(self._points).reshape(-1, 3)[::-1].T
        unique, last = numpy.unique(steps, return_index=True)  # the first index in reverse order
        return Series(unique.astype(numpy.int64), clock(times[last]), values[last])


class RunClock:
    """Converter of Unix timestamps into seconds since the start of a run, without pauses.

    Before a resume, the longest time without an event or a line of a rank is a pause.

    Args:
        active: times at which a process of the run wrote, in any order.
        resumed: for each resume, time of the last event before, and time of the resume.
    """

    def __init__(self, active: Floats, resumed: Sequence[tuple[float, float]]) -> None:
        active = numpy.unique(active)
        self._begin, self._end = (float(active[0]), float(active[-1])) if len(active) else (0.0, 0.0)
        pauses = []
        for before, after in resumed:
            times = active[(active >= before) & (active <= after)]
            if len(times) > 1:
                gaps = numpy.diff(times)
                longest = int(gaps.argmax())
                pauses.append((float(times[longest + 1]), float(gaps[longest])))
        self._pause_ends = numpy.array([end for end, _ in sorted(pauses)])
        self._paused = numpy.cumsum([0.0, *(length for _, length in sorted(pauses))])

    def __call__(self, times: Floats) -> Floats:
        """Return seconds of the run; within a pause, at least those of its end."""
        paused = self._paused[numpy.searchsorted(self._pause_ends, times, side="right")]
        seconds: Floats = numpy.maximum(times - self._begin - paused, 0.0)
        return seconds

    def at(self, time: float) -> float:
        """Return seconds of the run for one time."""
        return float(self(numpy.array([time]))[0])

    @property
    def total(self) -> float:
        """Duration of the run without pauses."""
        return self.at(self._end)


def _buckets(points: int, count: int) -> list[tuple[int, int]]:
    """Return begin and end of `count` slices of nearly equal size."""
    return list(pairwise(numpy.linspace(0, points, count + 1).astype(int).tolist()))


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values.tolist()]
