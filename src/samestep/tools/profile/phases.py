"""What a rank spent the time of a step on."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.tools.profile.intervals import Interval, length, overlap, union
from samestep.tools.profile.steps import PHASES, Phase, Step


def waits(step: Step) -> list[Interval]:
    """When the thread that trains could not go on for communication: what of that is exposed."""
    whole = [(each.begin, each.end) for each in step.segments if each.phase == "communication"]
    together = [(each.begin, each.end) for each in step.segments if each.phase == "computing"]
    own = [(each.begin, each.end) for each in step.meetings if not each.is_beside]
    # Where shards are computed side by side, all of them wait when one does.
    beside = overlap(together, [(each.begin, each.end) for each in step.meetings if each.is_beside])
    return union([*whole, *own, *beside])


def phase_seconds(step: Step) -> dict[Phase, float]:
    """The whole of a step by phases: what is exposed of communication counts as that, wherever it happens."""
    exposed = waits(step)
    found: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
    for each in step.segments:
        if each.phase != "communication":
            inside = length(overlap([(each.begin, each.end)], exposed))
            found[each.phase] += each.end - each.begin - inside
    found["communication"] = length(exposed)
    return found


def hidden_seconds(step: Step) -> float:
    """How long this rank communicated beside its own work."""
    beside = union((each.begin, each.end) for each in step.meetings if each.is_beside)
    return length(beside) - length(overlap(beside, waits(step)))


def means(steps: Sequence[Step]) -> dict[Phase, float]:
    """Of each phase over some steps, in seconds."""
    found = [phase_seconds(step) for step in steps]
    return {phase: sum(each[phase] for each in found) / len(found) for phase in PHASES}
