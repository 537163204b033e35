"""A curve: values against steps and time, thinned so that a page of a long run stays small."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy
from numpy.typing import NDArray

BUCKETS = 400  # of each, the least and the largest value are kept
MEANS = 200  # a curve of twice as many points has means of so many stretches besides
_HOLES = 50
_DIGITS = 6

Floats = NDArray[numpy.float64]


@dataclass(frozen=True)
class Series:
    """Points in the order of their steps, each step once.

    Attributes:
        steps: of the run.
        seconds: since the run began, pauses aside.
        values: NaN and infinities among them.
    """

    steps: NDArray[numpy.int64]
    seconds: Floats
    values: Floats

    def thinned(self, buckets: int = BUCKETS) -> Series:
        """The first and the last of the finite points, and the least and the largest of each of so many buckets."""
        there = numpy.flatnonzero(numpy.isfinite(self.values))
        if len(there) > 2 * buckets:
            kept = {0, len(there) - 1}
            for begin, end in _stretches(len(there), buckets):
                values = self.values[there[begin:end]]
                kept |= {begin + int(values.argmin()), begin + int(values.argmax())}
            there = there[sorted(kept)]
        return self._at(there)

    def means(self, stretches: int = MEANS) -> Series:
        """The mean of the finite values of each of so many stretches, in its middle; nothing of a short curve."""
        there = numpy.flatnonzero(numpy.isfinite(self.values))
        bounds = _stretches(len(there), stretches) if len(there) > 2 * stretches else []
        middles = self._at(there[[(begin + end) // 2 for begin, end in bounds]])
        values = [float(self.values[there[begin:end]].mean()) for begin, end in bounds]
        return Series(middles.steps, middles.seconds, numpy.array(values))

    def holes(self) -> Series:
        """The points that are not finite; of many, some."""
        there = numpy.flatnonzero(~numpy.isfinite(self.values))
        if len(there) > _HOLES:
            there = there[numpy.linspace(0, len(there) - 1, _HOLES).astype(int)]
        return self._at(there)

    def data(self) -> dict[str, Any]:
        """What a page draws: `points`, their `means`, and `holes`, where values are not finite, `bad` in all."""
        return {
            "points": self.thinned().lists(),
            "means": self.means().lists(),
            "holes": self.holes().lists(),
            "bad": int(numpy.count_nonzero(~numpy.isfinite(self.values))),
        }

    def lists(self) -> dict[str, list[int] | list[float]]:
        """`x` steps, `t` seconds, `y` values; these only where they are finite, as JSON has no others."""
        values = _rounded(self.values[numpy.isfinite(self.values)])
        return {"x": self.steps.tolist(), "t": _rounded(self.seconds), "y": values}

    def extremes(self) -> dict[str, float] | None:
        """The least, largest and last finite value, and their mean; None without any."""
        values = self.values[numpy.isfinite(self.values)]
        if not len(values):
            return None
        return {
            "least": float(values.min()),
            "largest": float(values.max()),
            "mean": float(values.mean()),
            "median": float(numpy.median(values)),
            "last": float(values[-1]),
        }

    def _at(self, places: NDArray[numpy.int64]) -> Series:
        return Series(self.steps[places], self.seconds[places], self.values[places])


class Points:
    """The points of a curve in the order in which a file tells them; 24 bytes each."""

    def __init__(self) -> None:
        self._steps, self._times, self._values = array("q"), array("d"), array("d")

    def add(self, step: int, time: float, value: float) -> None:
        """One point; where a step is there already, this one counts."""
        self._steps.append(step)
        self._times.append(time)
        self._values.append(value)

    def series(self, clock: Callable[[Floats], Floats]) -> Series:
        """Every step once, by its last point; `clock` turns times of day into seconds of the run."""
        steps, last = numpy.unique(numpy.array(self._steps, numpy.int64)[::-1], return_index=True)
        places = len(self._steps) - 1 - last
        return Series(steps, clock(numpy.array(self._times)[places]), numpy.array(self._values)[places])


def _stretches(count: int, number: int) -> list[tuple[int, int]]:
    """So many slices of `count` points, as even as can be."""
    return list(pairwise(numpy.linspace(0, count, number + 1).astype(int).tolist()))


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values.tolist()]
