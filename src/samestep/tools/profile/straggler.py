"""The straggler: the one rank that the other ranks wait for again and again."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from samestep.tools.profile.measurements import Measurements, Phase

# A straggler causes at least this share of a step, and of all waits, ...
_SHARE_OF_STEP, _SHARE_OF_WAITS = 0.05, 0.6
# ... and its longest phase explains at least this share of the waits for it.
_EXPLAINED_SHARE = 0.3


@dataclass(frozen=True)
class Straggler:
    """Rank that arrives late again and again."""

    rank: int
    seconds: float  # wait of each other rank for this rank, per step
    last: int  # number of collectives at which this rank arrived last, of the `apart` collectives with uneven arrivals
    apart: int
    phase: Phase  # phase with the largest difference to the other ranks
    more: float  # that difference, in seconds per step


def straggler_of(measured: Measurements) -> Straggler | None:
    """Return the rank that the other ranks wait for; None if no rank stands out."""
    lateness = measured.lateness
    if measured.size == 1 or not lateness.steps:
        return None
    seconds = max(lateness.caused)
    rank = lateness.caused.index(seconds)
    others = [phases for other, phases in enumerate(measured.phases) if other != rank]
    excess = {
        phase: own - mean(phases[phase] for phases in others)
        for phase, own in measured.phases[rank].items()
        if phase != "communication"
    }
    phase = max(excess, key=lambda phase: excess[phase])
    least = max(_SHARE_OF_STEP * measured.step_seconds, _SHARE_OF_WAITS * sum(lateness.caused))
    if seconds < least or excess[phase] < _EXPLAINED_SHARE * seconds:
        return None
    return Straggler(rank, seconds, lateness.last[rank], lateness.apart, phase, excess[phase])
