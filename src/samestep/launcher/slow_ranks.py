"""Detection of ranks that need more time per microbatch than the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

from samestep.distributed.status import StatusSnapshot
from samestep.launcher.watchdog import RankState

# A rank is slow if its seconds per microbatch exceed this multiple of the median in two consecutive intervals.
_SLOW_FACTOR = 1.5
_SLOW_INTERVAL_SECONDS = 5.0
# Minimum difference in seconds per microbatch; smaller ones are noise.
_SLOW_MARGIN_SECONDS = 0.005


class SlowRanks:
    """Periodic comparison of the speeds of the ranks of one launch."""

    def __init__(self) -> None:
        self._base: Mapping[int, StatusSnapshot] = {}
        self._base_time = time.monotonic()
        self._suspect: int | None = None
        self._reported: set[int] = set()

    def message(self, states: Mapping[int, RankState]) -> str | None:
        """Return a message about a rank that has become slow, once per rank."""
        now, statuses = time.monotonic(), {rank: state.status for rank, state in states.items()}
        if not self._base or not all(status.microbatches for status in self._base.values()):  # not all have begun
            self._base, self._base_time = statuses, now
        if now - self._base_time < _SLOW_INTERVAL_SECONDS:
            return None
        before, self._base, self._base_time = self._base, statuses, now
        suspect, self._suspect = self._suspect, None
        known = {  # seconds per microbatch
            rank: (status.compute_seconds - before[rank].compute_seconds) / microbatches
            for rank, status in statuses.items()
            if (microbatches := status.microbatches - before[rank].microbatches)
        }
        if len(known) < 2 or len(known) < len(statuses):
            return None
        slowest = max(known, key=lambda rank: known[rank])
        median = statistics.median(cost for rank, cost in known.items() if rank != slowest)
        excess = known[slowest] - median
        if slowest in self._reported or known[slowest] < _SLOW_FACTOR * median or excess < _SLOW_MARGIN_SECONDS:
            return None
        self._suspect = slowest
        if suspect != slowest:
            return None
        self._reported.add(slowest)
        return (
            f"rank {slowest} is slow: {known[slowest]:.3f} s per microbatch, data included; the other ranks need "
            f"{median:.3f} s and wait"
        )
