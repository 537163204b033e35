"""What is found to cost time, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why a step takes longer than it would have to."""

    LOADER = "slow loader"
    RANK = "slow rank"
    SYNCHRONISATION = "synchronisation every step"
    BUCKETS = "tiny buckets"
    CHECKPOINT = "checkpoint stall"
    HOST = "host-bound"
    UNEVEN = "uneven shards"
    COMMUNICATION = "communication"


@dataclass(frozen=True)
class Advice:
    """One cause.

    Attributes:
        seconds: what a step would be shorter at most.
        evidence: what was measured.
        do: what to change.
        estimate: how `seconds` follows from what was measured.
    """

    cause: Cause
    seconds: float
    evidence: str
    do: str
    estimate: str


def milliseconds(seconds: float) -> str:
    """Seconds as people read them: `1,234 ms`, `12.3 ms`, `0.12 ms`."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"
