"""Phases of a step: times of one rank from its records, and the slowest of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import mean
from typing import Literal, NamedTuple, get_args

# `computing`: forward and backward of microbatches that are not computed one after another.
Phase = Literal["data", "forward", "backward", "computing", "communication", "optimizer", "other"]
PHASES: tuple[Phase, ...] = get_args(Phase)
PhaseSeconds = dict[Phase, float]
Interval = tuple[float, float]
_LEAST_SHARE = 0.1  # of a step, by which the slowest rank is slower than the others


class Collective(NamedTuple):
    """Collective operation of a rank."""

    is_background: bool  # the operation ran in another thread than the training thread
    begin: float
    end: float


def phase_seconds(
    marks: Sequence[tuple[Phase, float]], collectives: Sequence[Collective]
) -> PhaseSeconds:
    """Return the seconds of each phase of a step. Exposed communication counts only as communication.

    Args:
        marks: phases of the training thread with their begins; the last mark is the end of the
            step.
        collectives: collective operations of the step.
    """
    segments = [(phase, (begin, end)) for (phase, begin), (_, end) in pairwise(marks)]
    # The training thread waits in these intervals.
    waits = [interval for phase, interval in segments if phase == "communication"]
    waits += [(begin, end) for is_background, begin, end in collectives if not is_background]
    # Microbatches that are computed concurrently all wait for one collective.
    computing = [interval for phase, interval in segments if phase == "computing"]
    exposed = union(
        waits + overlap(computing, [(begin, end) for is_background, begin, end in collectives])
    )
    result: PhaseSeconds = dict.fromkeys(PHASES, 0.0)
    for phase, interval in segments:
        if phase != "communication":
            result[phase] += length([interval]) - length(overlap([interval], exposed))
    result["communication"] = length(exposed)
    return result


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals, in order."""
    result: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def overlap(some: Iterable[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions of intervals as disjoint intervals, in order."""
    return union(
        (max(begin, start), min(end, stop)) for begin, end in some for start, stop in others
    )


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    return sum(end - begin for begin, end in union(intervals))


@dataclass(frozen=True)
class SlowestRank:
    """Rank that the others wait for."""

    rank: int
    seconds: float  # by which the rank is busy for longer than the others, per step
    phase: Phase  # phase with the largest difference to the others


@dataclass(frozen=True)
class Measurements:
    """Measured steps of all ranks."""

    phases: list[PhaseSeconds]  # mean seconds of each phase in a step, by rank
    is_known_inside: bool  # communication within forward and backward is measured

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.phases)

    @cached_property
    def step_seconds(self) -> float:
        """Mean duration of a step."""
        return mean(sum(phases.values()) for phases in self.phases)

    @cached_property
    def slowest(self) -> SlowestRank | None:
        """The rank that the others wait for; None if no rank stands out.

        All ranks end a step at the same time, so the slowest rank is the one that is busy for
        longest between the waits of communication. Ranks that are slow in turn are equally busy on
        average.
        """
        if self.size == 1 or not self.is_known_inside:
            return None
        busy = [sum(phases.values()) - phases["communication"] for phases in self.phases]
        rank = busy.index(max(busy))
        others = [phases for other, phases in enumerate(self.phases) if other != rank]
        more: PhaseSeconds = {
            phase: seconds - mean(phases[phase] for phases in others)
            for phase, seconds in self.phases[rank].items()
            if phase != "communication"
        }
        seconds = sum(more.values())
        if seconds < _LEAST_SHARE * self.step_seconds:
            return None
        return SlowestRank(rank, seconds, phase=max(more, key=lambda phase: more[phase]))
