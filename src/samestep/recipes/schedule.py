"""The learning rate as a factor of the optimizer's own, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable

from samestep.config import SchedulePart


def schedule_factor(schedule: SchedulePart, steps_per_epoch: int, epochs: int) -> Callable[[int], float]:
    """The factor of the learning rate before step `n` (from 0): linear warm-up, then what the schedule's name says.

    The cosine is that of Loshchilov & Hutter, "SGDR" (2017), without restarts; it and `linear` begin where the warm-up
    ends and reach `final` at the last step. The drops of `step` are counted from the first step of the run, so that
    they come at the same epochs whatever the warm-up (Goyal et al., "Accurate, large minibatch SGD", 2017).
    """
    warmup = round(schedule.warmup_epochs * steps_per_epoch)
    falling = max(1, steps_per_epoch * epochs - 1 - warmup)
    every = max(1, round(schedule.step_epochs * steps_per_epoch))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule.name == "constant":
            return 1.0
        if schedule.name == "step":
            return schedule.gamma ** (step // every)
        done = min(1.0, (step - warmup) / falling)
        left = 0.5 * (1 + math.cos(math.pi * done)) if schedule.name == "cosine" else 1 - done
        return schedule.final + (1 - schedule.final) * left

    return factor
