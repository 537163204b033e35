"""Shares of the microbatches that follow the measured speeds of the ranks during a run; no result depends on them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from samestep.data.batch import GlobalBatch
from samestep.distributed.world import all_gather
from samestep.engine.engine import Engine
from samestep.microbatches import owned_microbatches

_WORTHWHILE = 0.85  # largest predicted step time of new shares, relative to the present ones
_CONFIRMATIONS = 2  # consecutive decisions for new shares before a move
_MIN_STEPS = 10  # of a measurement


def divide(microbatches: int, speeds: Sequence[float]) -> list[int]:
    """Return the number of microbatches of each rank, at least one, for which the slowest rank ends first.

    Args:
        microbatches: number of microbatches, at least one per rank.
        speeds: microbatches per second of each rank.
    """
    counts = [1] * len(speeds)
    for _ in range(microbatches - len(speeds)):
        # Greedy assignment is optimal for equal tasks on machines of different speeds.
        rank = min(range(len(speeds)), key=lambda number: ((counts[number] + 1) / speeds[number], counts[number]))
        counts[rank] += 1
    return counts


def step_seconds(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the time after which the last rank has computed its microbatches."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def format_shares(shares: Sequence[int]) -> str:
    """Return shares as the command line reads them."""
    return ",".join(map(str, shares))


class ShareRule:
    """Decision on new shares from measured times; the same times give the same decision on every rank.

    New shares must shorten the predicted step by 15 % in two decisions in a row.

    Args:
        counts: number of microbatches of each rank at the beginning.

    Attributes:
        counts: number of microbatches of each rank.
        predicted: how many times as fast a step is with the last new shares.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts, self.predicted, self._confirmed = tuple(counts), 1.0, 0

    def decide(self, seconds: Sequence[float]) -> bool:
        """Set new `counts` if they are worthwhile, and return whether they are new.

        Args:
            seconds: positive time of one microbatch on each rank.
        """
        speeds = [1 / cost for cost in seconds]
        counts = divide(sum(self.counts), speeds)
        before, after = step_seconds(self.counts, speeds), step_seconds(counts, speeds)
        self._confirmed = self._confirmed + 1 if after <= _WORTHWHILE * before else 0
        if self._confirmed < _CONFIRMATIONS:
            return False
        self.counts, self.predicted, self._confirmed = tuple(counts), before / after, 0
        return True


class ShareBalancer:
    """Moves microbatches from slow ranks to fast ones between two iterations of the loader.

    The time of a rank is that of its own work: waiting for data, forward and backward, without waits for other ranks.

    Args:
        engine: engine of plain replication.
        microbatches: number of microbatches of a complete batch, at least one per rank.
        batch_size: samples of a complete batch.
    """

    def __init__(self, engine: Engine, microbatches: int, batch_size: int) -> None:
        self._engine, self._data, self._batch_size = engine, engine.world.data, batch_size
        owned = (owned_microbatches(microbatches, self._data.shares, rank) for rank in range(self._data.size))
        self._rule = ShareRule([len(numbers) for numbers in owned])
        self._steps, self._seconds = 0, list[float]()  # since the last decision

    def add_step(self, batch: GlobalBatch, data_seconds: float) -> None:
        """Add the time of a step that is complete, with its wait for data."""
        self._steps += 1
        clock = self._engine.step_runner.strategy.clock  # another one after parameters were frozen or replaced
        seconds = clock.seconds if clock is not None and batch.size == self._batch_size else None
        if clock is not None:
            clock.is_enabled = True
        if seconds is not None:
            self._seconds.append((data_seconds + seconds) / len(batch.local_microbatches))

    def move(self) -> dict[str, Any] | None:
        """Decide, and return the fields of an event if the shares have changed. Collective.

        Without effect if there were few steps since the last call. An iteration of a loader in progress has batches of
        the earlier shares: the caller begins a new one.
        """
        if self._steps < _MIN_STEPS:
            return None
        own = statistics.median(self._seconds) if self._seconds else None
        costs = all_gather(own, self._data)
        self._steps, self._seconds = 0, []
        if None in costs or not self._rule.decide(costs):
            return None
        counts = self._rule.counts
        self._data.move_shares(counts)
        self._engine.step_runner.shares_moved()
        shown = ", ".join(f"{1000 * cost:.3g}" for cost in costs)
        text = f"shares {format_shares(counts)}: predicted {self._rule.predicted:.2f} times as fast"
        return {
            "step": self._engine.steps,
            "shares": list(counts),
            "predicted": round(self._rule.predicted, 3),
            "seconds_per_microbatch": [float(f"{cost:.4g}") for cost in costs],
            "text": f"{text}; time of a microbatch on each rank: {shown} ms",
        }
