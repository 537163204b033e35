"""What a machine or a person decides about a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from samestep.config.check import require

DeviceKind = Literal["auto", "cpu", "cuda"]

DEFAULT_PREFETCH = 2  # as torch's DataLoader has it
_MOST_WORKERS = 8


def default_workers(cores: int, processes: int) -> int:
    """Loader processes a rank where nobody says how many and samples are read from files: what cores allow."""
    return min(_MOST_WORKERS, max(0, cores // processes - 1))


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a machine or a person decides about a run; no result depends on any of it.

    Attributes:
        device: `auto` takes a GPU a rank where there are any.
        workers: loader processes a rank; None means as many as there are cores to spare where samples are read from
            files, else none.
        prefetch: shards that each of them makes ahead.
        tuned: the file that `workers` and `prefetch` were taken from, if from any.
        checkpoint_every: optimizer steps between checkpoints besides those at the ends of epochs, or None.
        lose_at_most: seconds of work that a kill may cost; checkpoints are written often enough. None for no bound.
        keep: how many of the newest checkpoints stay, besides the best.
        check_every: optimizer steps between comparisons of what ranks hold, or None for none.
        quiet: no progress, only the summary.
    """

    device: DeviceKind = "auto"
    workers: int | None = None
    prefetch: int = DEFAULT_PREFETCH
    tuned: str | None = None
    checkpoint_every: int | None = None
    lose_at_most: float | None = None
    keep: int = 2
    check_every: int | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        every, workers = self.checkpoint_every, self.workers
        require(workers is None or workers >= 0, f"workers is {workers}", "workers >= 0", "--workers 0")
        require(self.prefetch >= 1, f"prefetch is {self.prefetch}", "at least 1 shard", "--prefetch 2")
        require(
            every is None or every >= 1, f"checkpoint_every is {every}", "at least 1 step", "--checkpoint-every 100"
        )
        lose = self.lose_at_most
        require(
            lose is None or 0 < lose < math.inf,
            f"lose_at_most is {lose}",
            "a number of seconds above 0",
            "--lose-at-most 30s",
        )
        check = self.check_every
        require(check is None or check >= 1, f"check_every is {check}", "at least 1 step", "--check-every 100")
        require(self.keep >= 1, f"keep is {self.keep}", "at least 1 checkpoint stays", "--keep 1")
