"""Findings about a machine, and the planned run with which memory and limits are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from samestep.units import plural

Verdict = Literal["info", "pass", "warn", "fail"]  # by severity


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str  # subject of the check
    # `info`: no judgement. `warn`: a run works, but slowly or differently than expected. `fail`: a
    # run fails, hangs or loses data.
    verdict: Verdict
    value: str
    expected: str | None = None  # rule for a warning or a failure
    fix: str | None = None  # action for a warning or a failure


def judged(name: str, verdict: Verdict, value: str, expected: str, fix: str) -> Finding:
    """Return a finding, with `expected` and `fix` only for a warning or a failure."""
    if verdict in ("warn", "fail"):
        return Finding(name, verdict, value, expected, fix)
    return Finding(name, verdict, value)


@dataclass(frozen=True)
class Plan:
    """Planned processes on this machine, and the needs of a small model."""

    processes: int  # ranks on this machine
    workers: int  # loader workers per rank; training and evaluation have as many each

    @property
    def memory(self) -> int:
        """Bytes of all ranks (512 MiB: torch, a small model, an optimizer) and workers (256 MiB)."""
        return self.processes * (512 + 2 * self.workers * 256) << 20

    @property
    def shared_memory(self) -> int:
        """Bytes of three microbatches per worker, each of 32 float32 images of 224 x 224 pixels."""
        return self.processes * self.workers * 3 * 20 << 20

    @property
    def open_files(self) -> int:
        """Open files per rank; measured: 33 in one of two ranks, 67 in one of two ranks with two workers."""
        return 32 + 4 * self.processes + 2 * 10 * self.workers

    def __str__(self) -> str:
        return f"{plural(self.processes, 'rank')} with {plural(self.workers, 'worker')} each"
