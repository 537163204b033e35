"""What a step would take if a rank had less to do: ranks wait for the one that has most."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from samestep.tools.profile.measured import Measured
from samestep.tools.profile.steps import Phase

Phases = dict[Phase, float]


def own_seconds(phases: Phases) -> float:
    """What a rank does itself in a step: all but communication."""
    return sum(seconds for phase, seconds in phases.items() if phase != "communication")


def computing_seconds(phases: Phases) -> float:
    """Forward and backward."""
    return phases["forward"] + phases["backward"] + phases["computing"]


def saved(found: Measured, less: Callable[[int, Phases], float]) -> float:
    """By how much a step would be shorter, in seconds, if `less(rank, phases)` of each rank's own time went away.

    Step by step, since it is not the same rank in each that has most to do.
    """
    saving = []
    for same in zip(*found.by_step, strict=True):
        now = [own_seconds(phases) for phases in same]
        then = [seconds - less(rank, phases) for rank, (seconds, phases) in enumerate(zip(now, same, strict=True))]
        saving.append(max(now) - max(then))
    return max(0.0, mean(saving))
