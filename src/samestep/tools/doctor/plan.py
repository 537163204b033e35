"""What somebody means to run here, as far as the machine has to bear it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# What a rank takes that trains nothing yet: its own import of torch, a small model, an optimizer.
RANK_BYTES = 512 << 20
# 32 images of 224 x 224 pixels in float32 are 18 MiB.
SHARD_BYTES = 20 << 20
WORKER_BYTES = 256 << 20
# Training and evaluation each have workers of their own, which stay.
LOADERS = 2
# Shards that each worker of torch's DataLoader makes ahead, and the one that is being read.
SHARDS_AHEAD = 3


@dataclass(frozen=True)
class Plan:
    """What is to run.

    Attributes:
        runs: the folder of runs.
        processes: ranks on this machine.
        workers: loader processes a rank.
        threads: intra-operation threads a rank, `step.threads` of a recipe.
        rank_bytes: memory that one rank takes.
        worker_bytes: memory that one worker takes for itself.
        shard_bytes: what a worker hands over at a time.
    """

    runs: Path
    processes: int = 1
    workers: int = 0
    threads: int = 1
    rank_bytes: int = RANK_BYTES
    worker_bytes: int = WORKER_BYTES
    shard_bytes: int = SHARD_BYTES

    @property
    def memory(self) -> int:
        """What ranks and workers take together."""
        return self.processes * (self.rank_bytes + LOADERS * self.workers * self.worker_bytes)

    @property
    def shared_memory(self) -> int:
        """What shards take that workers have handed over and nobody has used yet."""
        return self.processes * self.workers * SHARDS_AHEAD * self.shard_bytes

    @property
    def tasks(self) -> int:
        """Processes and threads that the kernel counts.

        Measured: a rank had 14, for gloo, its launcher's watch, checkpoints and curves; a worker 3.
        """
        return self.processes * (16 + self.threads + LOADERS * 3 * self.workers)

    @property
    def files(self) -> int:
        """Files that a rank holds open: its own, connections to the others, pipes and shared memory of its workers.

        Measured: 33 in one of two ranks, 53 in one of four with a worker, 67 in one of two with two workers.
        """
        return 32 + 4 * self.processes + LOADERS * 10 * self.workers

    def __str__(self) -> str:
        ranks = f"{self.processes} rank{'s' if self.processes > 1 else ''}"
        each = " each" if self.processes > 1 else ""
        workers = f"{self.workers or 'no'} worker{'' if self.workers == 1 else 's'}"
        return f"{ranks} with {self.threads} thread{'s' if self.threads > 1 else ''} and {workers}{each}"


@dataclass(frozen=True)
class Wishes:
    """What somebody says of what is to run.

    Attributes:
        plan: all but ranks and workers.
        processes: ranks on this machine; None for as many as `--processes auto` would start.
        workers: a rank; None for as many as a recipe takes that reads files.
    """

    plan: Plan
    processes: int | None = None
    workers: int | None = None
