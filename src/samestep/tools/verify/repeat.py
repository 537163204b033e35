"""What does not even repeat itself: the same run twice on the same number of processes."""

from __future__ import annotations

from samestep.tools.verify.causes import Cause, Finding, where
from samestep.tools.verify.compare import compare
from samestep.tools.verify.difference import Comparison, Difference
from samestep.tools.verify.lab import Lab
from samestep.tools.verify.plan import in_words
from samestep.tools.verify.samples import inputs_finding

# In float64 rounding stays far below this, and wrong mathematics far above.
ROUNDING = 1e-9
# What is not even repeated by the same number of processes, where no arithmetic is between it and the seed.
_NOT_SEEDED = {
    "order": Cause.DATA_ORDER,
    "shards": Cause.SHARDS,
    "rates": Cause.LEARNING_RATE,
    "settings": Cause.RULES,
}


def unrepeatable(lab: Lab, processes: int) -> Finding | None:
    """The cause of a difference between two runs on `processes` ranks; None where they compute the same."""
    base = lab.trial(processes)
    second = lab.again(base)
    again = _between_runs(compare(base, second, None))
    if again is None:
        return None
    evidence = f"{in_words(processes)}, run twice, differ from one run to the other: {where(again)}"
    if again.stage in _NOT_SEEDED:
        return Finding(_NOT_SEEDED[again.stage], again, (evidence, "it does not come from a seed"))
    if again.stage in ("inputs", "targets"):
        found = inputs_finding(lab, base, second, again)
        return Finding(found.cause, again, (evidence, *found.evidence))
    if again.stage == "before":
        cause = Cause.INITIAL_WEIGHTS if again.step == 1 else Cause.UNSYNCHRONISED
        return Finding(cause, again, (evidence, "it does not come from a seed, or is changed between steps"))
    if again.stage not in ("outputs", "loss", "gradients"):
        return Finding(Cause.UNKNOWN, again, (evidence,))
    return _of_arithmetic(lab, processes, again, evidence)


def _of_arithmetic(lab: Lab, processes: int, again: Difference, evidence: str) -> Finding:
    held = lab.hold(double=True)
    exact = lab.trial(processes, held)
    size = largest_distance(compare(exact, lab.again(exact, held), None))
    if size < ROUNDING:
        rounding = f"in float64 the two are at most {size:.1e} apart: rounding, in another order each time"
        return Finding(Cause.KERNEL, again, (evidence, rounding))
    return Finding(Cause.MODEL_RANDOM, again, (evidence, f"in float64 they are still {size:.1e} apart: not rounding"))


def largest_distance(compared: Comparison) -> float:
    """The largest distance that was measured at the first step that differs; 0 where nothing differs."""
    if compared.first is None:
        return max(compared.largest.values(), default=0.0)
    sizes = [
        each.distance
        for each in compared.failing
        if each.step == compared.first.step and each.stage in ("outputs", "loss", "gradients")
    ]
    return max((size for size in sizes if size is not None), default=float("inf"))


def _between_runs(compared: Comparison) -> Difference | None:
    """The first difference of two runs that is not one between the ranks of a run."""
    found = [each for each in compared.failing if each.ranks is None]
    return min(found, key=lambda each: each.place, default=None)
