"""Findings about a machine, and the planned processes with their use of memory, threads and files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samestep.units import plural

# An idle rank: torch, a small model, an optimizer.
RANK_BYTES = 512 << 20
# 32 float32 images of 224 x 224 pixels take 18 MiB.
MICROBATCH_BYTES = 20 << 20
WORKER_BYTES = 256 << 20
# Training and evaluation have separate, persistent workers.
_LOADERS = 2
# A DataLoader worker prefetches two microbatches; a third is being read.
_MICROBATCHES_IN_FLIGHT = 3

Verdict = Literal["pass", "info", "warn", "fail"]
_SEVERITY: tuple[Verdict, ...] = ("info", "pass", "warn", "fail")


@dataclass(frozen=True)
class Plan:
    """Planned processes on this machine."""

    runs: Path  # runs folder
    processes: int = 1  # ranks on this machine
    workers: int = 0  # loader workers per rank
    threads: int = 1  # intra-op threads per rank, `step.threads` of a recipe
    rank_bytes: int = RANK_BYTES  # memory per rank
    worker_bytes: int = WORKER_BYTES  # private memory per worker
    microbatch_bytes: int = MICROBATCH_BYTES  # size of one microbatch from a worker

    @property
    def memory(self) -> int:
        """Bytes of all ranks and workers."""
        return self.processes * (self.rank_bytes + _LOADERS * self.workers * self.worker_bytes)

    @property
    def shared_memory(self) -> int:
        """Bytes of prefetched microbatches in shared memory."""
        return self.processes * self.workers * _MICROBATCHES_IN_FLIGHT * self.microbatch_bytes

    @property
    def tasks(self) -> int:
        """Processes and threads; measured: 14 per rank (gloo, heartbeat, checkpoints, loggers), 3 per worker."""
        return self.processes * (16 + self.threads + _LOADERS * 3 * self.workers)

    @property
    def open_files(self) -> int:
        """Open files per rank: connections, pipes and shared memory of workers.

        Measured: 33 in one of two ranks, 53 in one of four with a worker, 67 in one of two with two workers.
        """
        return 32 + 4 * self.processes + _LOADERS * 10 * self.workers

    def __str__(self) -> str:
        workers = plural(self.workers, "worker") if self.workers else "no workers"
        each = " each" if self.processes > 1 else ""
        return f"{plural(self.processes, 'rank')} with {plural(self.threads, 'thread')} and {workers}{each}"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str  # subject of the check
    # `info`: no judgement. `warn`: a run works, but slowly or differently than expected. `fail`: a run fails, hangs or
    # loses data.
    verdict: Verdict
    value: str
    expected: str | None = None  # rule for a warning or a failure
    fix: str | None = None  # action for a warning or a failure


def judged(name: str, verdict: Verdict, value: str, expected: str, fix: str) -> Finding:
    """Return a finding, with `expected` and `fix` only for a warning or a failure."""
    return (
        Finding(name, verdict, value, expected, fix) if verdict in ("warn", "fail") else Finding(name, verdict, value)
    )


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the most severe verdict; `pass` for no findings."""
    return max((finding.verdict for finding in findings), key=_SEVERITY.index, default="pass")
