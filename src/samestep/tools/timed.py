"""What comes of timing steps, as numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timed:
    """Some steps.

    Attributes:
        step_seconds: of one step, the wait for its batch included; the mean.
        data_share: how much of that was the wait for batches.
        samples_per_second: over all ranks.
    """

    step_seconds: float
    data_share: float
    samples_per_second: float


@dataclass(frozen=True)
class Spread:
    """A median with its first and third quartile."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        several = [*values, *values] if len(values) == 1 else values
        q1, median, q3 = statistics.quantiles(several, n=4, method="inclusive")
        return cls(median, q1, q3)

    def times(self, factor: float) -> Spread:
        """The same of values that are so many times as large."""
        return Spread(self.median * factor, self.q1 * factor, self.q3 * factor)
