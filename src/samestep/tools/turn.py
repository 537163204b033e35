"""A turn: some steps that all ranks make together, and time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from samestep.data.batch import GlobalBatch
from samestep.engine.step import Engine
from samestep.record.stopwatch import Stopwatch
from samestep.runtime.world import World
from samestep.tools.timed import Timed


@dataclass(frozen=True)
class Turn:
    """Some steps, as one rank saw them.

    Attributes:
        seconds: of all of them, the waits for batches included.
        samples: over all ranks.
        waits: of each step, the seconds that this rank waited for its batch.
    """

    seconds: float
    samples: int
    waits: list[float]

    @property
    def timed(self) -> Timed:
        """The same in the mean over steps."""
        return Timed(self.seconds / len(self.waits), sum(self.waits) / self.seconds, self.samples / self.seconds)


def time_steps(engine: Engine, batches: Iterator[GlobalBatch], *, warmup: int, steps: int) -> Turn | None:
    """Make some steps and time those after the first `warmup`; nothing if somebody asked to end."""
    if any(engine.step(batch).stop for batch in islice(batches, warmup)):
        return None
    watch, samples, waits = Stopwatch(), 0, []
    _finish(engine.world)
    began = time.perf_counter()
    for _ in range(steps):
        with watch.waiting():
            batch = next(batches)
        if engine.step(batch).stop:
            return None
        samples += batch.size
        waits.append(watch.last_wait)
    _finish(engine.world)
    return Turn(time.perf_counter() - began, samples, waits)


def _finish(world: World) -> None:
    """Wait for all that ranks and their devices are still at."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.barrier()
