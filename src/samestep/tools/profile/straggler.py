"""The rank that the others wait for, and where it loses the time."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from samestep.tools.profile.measured import Measured
from samestep.tools.profile.steps import Phase

# Less of a step, or less of all waiting, is ranks coming late by turns.
_LEAST_SHARE, _LEAST_PART = 0.05, 0.6
# What it takes longer in one phase has to explain at least so much of the waiting.
_EXPLAINED = 0.3


@dataclass(frozen=True)
class Straggler:
    """A rank that comes late again and again.

    Attributes:
        seconds: what each of the others waits for it, a step.
        last: to how many meetings it came last, of `apart` to which ranks did not come together.
        phase: in which it takes longer than the others.
        more: by how many seconds a step.
    """

    rank: int
    seconds: float
    last: int
    apart: int
    phase: Phase
    more: float


def straggler(found: Measured) -> Straggler | None:
    """Who it is, by the times at which ranks come to collectives; None where no rank stands out."""
    waited = found.waiting
    if found.size == 1 or not waited.steps:
        return None
    rank = max(range(found.size), key=lambda each: waited.seconds[each])
    seconds = waited.seconds[rank]
    if seconds < _LEAST_SHARE * found.step_seconds or seconds < _LEAST_PART * sum(waited.seconds):
        return None
    phase, more = _lost_in(found, rank)
    if more < _EXPLAINED * seconds:
        return None
    return Straggler(rank, seconds, waited.last[rank], waited.apart, phase, more)


def _lost_in(found: Measured, rank: int) -> tuple[Phase, float]:
    """The phase in which a rank takes longest against the mean of the others, and by how much."""
    mine = found.phases[rank]
    others = [phases for each, phases in enumerate(found.phases) if each != rank]
    more: dict[Phase, float] = {
        phase: seconds - mean(each[phase] for each in others)
        for phase, seconds in mine.items()
        if phase != "communication"
    }
    phase = max(more, key=lambda each: more[each])
    return phase, more[phase]
