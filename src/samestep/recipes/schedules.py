"""Learning rate schedules of recipes."""

from __future__ import annotations

import math
from collections.abc import Callable

from samestep.config import ScheduleConfig


def schedule_factor(schedule: ScheduleConfig, steps_per_epoch: int, epochs: int) -> Callable[[int], float]:
    """Return a function from a step (from 0) to the factor of the learning rate.

    `cosine` is the schedule of Loshchilov & Hutter, "SGDR" (2017), without restarts. `cosine` and `linear` start after
    the warm-up and reach `final` at the last step. The decreases of `step` count from the first step of the run, so
    that the warm-up does not move them (Goyal et al., "Accurate, large minibatch SGD", 2017).
    """
    warmup = round(schedule.warmup_epochs * steps_per_epoch)
    decay = max(1, steps_per_epoch * epochs - 1 - warmup)
    period = max(1, round(schedule.step_epochs * steps_per_epoch))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule.name == "constant":
            return 1.0
        if schedule.name == "step":
            return schedule.gamma ** (step // period)
        progress = min(1.0, (step - warmup) / decay)
        remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
        return schedule.final + (1 - schedule.final) * remaining

    return factor
