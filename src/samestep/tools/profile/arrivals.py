"""Who comes last to what ranks do together, and how long the others wait for that.

A collective takes as long on all ranks, so its duration does not tell who is slow: who is waited for is there
shortest. What tells is when each rank came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from samestep.tools.profile.intervals import Interval, length, overlap
from samestep.tools.profile.phases import waits
from samestep.tools.profile.steps import Meeting, Step

# Ranks that come to a meeting within so many seconds came together.
_TOGETHER = 0.0005


@dataclass
class Waiting:
    """What ranks wait for each other, a step, by the rank that is waited for.

    Attributes:
        steps: of which it is known.
        apart: meetings to which ranks did not come together.
        last: to how many of them each rank came last.
        seconds: what the other ranks wait for each rank, a step; the mean over those others.
        within: the part of `seconds` that is in collectives of the user's own.
        own: what each rank waits for others, a step.
    """

    steps: int
    apart: int
    last: list[int]
    seconds: list[float]
    within: list[float]
    own: list[float] = field(default_factory=list)


def waiting(ranks: Sequence[Sequence[Step]]) -> Waiting:
    """From the same steps of each rank.

    A step in which ranks have not communicated in the same way, as where a layout divides the model, is left out.
    """
    size = len(ranks)
    found = Waiting(0, 0, [0] * size, [0.0] * size, [0.0] * size, [0.0] * size)
    for same in zip(*ranks, strict=True):
        pairs = list(_together(same))
        if not pairs:
            continue
        found.steps += 1
        exposed = [waits(step) for step in same]
        blamed: dict[tuple[int, int, bool], list[Interval]] = {}
        for meetings in pairs:
            last = max(range(size), key=lambda rank: meetings[rank].begin)
            late = meetings[last].begin
            if late - min(each.begin for each in meetings) > _TOGETHER:
                found.apart += 1
                found.last[last] += 1
            for rank, each in enumerate(meetings):
                if late > each.begin:
                    key = (rank, last, each.site is not None)
                    blamed.setdefault(key, []).append((each.begin, min(late, each.end)))
        for (rank, last, is_users), intervals in blamed.items():
            seconds = length(overlap(exposed[rank], intervals))
            found.seconds[last] += seconds / max(1, size - 1)
            found.own[rank] += seconds
            if is_users:
                found.within[last] += seconds / max(1, size - 1)
    steps = max(1, found.steps)
    for values in (found.seconds, found.within, found.own):
        values[:] = [value / steps for value in values]
    return found


def _together(same: Sequence[Step]) -> Iterator[tuple[Meeting, ...]]:
    """Each communication of a step with every rank's part in it; none where these do not fit together."""
    for is_beside in (False, True):
        lists = [[each for each in step.meetings if each.is_beside == is_beside] for step in same]
        names = {tuple((each.what, each.site is None) for each in meetings) for meetings in lists}
        if len(names) > 1:
            return
        yield from zip(*lists, strict=True)
