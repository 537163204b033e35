"""In which order stages compute micro-batches: torch's schedules, and which of them fits how many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from samestep.config import StrategyPart
from samestep.errors import InputError

_SEVERAL = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}


class Schedule(Protocol):
    """What lets micro-batches through the stages."""

    def step(self, *arguments: Any, target: torch.Tensor | None = None, **named: Any) -> Any: ...


def stage_count(part: StrategyPart, ranks: int) -> int:
    """How many stages a model is cut into for that many ranks.

    Raises:
        InputError: the named ones do not fit the schedule.
    """
    least = 2 * ranks if part.schedule == "interleaved" else ranks
    if not part.stages:
        return least
    count = len(part.stages) + 1
    fits = count >= least and count % ranks == 0 if part.schedule in _SEVERAL else count == ranks
    if not fits:
        raise InputError(
            f"strategy.stages names {count - 1} modules, which makes {count} stages for {ranks} ranks",
            rule=f"{part.schedule}: {_rule(part, ranks)}",
            do=f"name {least - 1} of them, or leave strategy.stages out",
        )
    return count


def schedule(name: str, stages: Sequence[PipelineStage], microbatches: int, *, training: bool) -> Schedule:
    """Torch's schedule of that name; where it does not fit so many micro-batches, the one that fits any number.

    Args:
        stages: those of this rank.
        training: backward comes too.
    """
    loss = _the_loss if training else None
    own: list[Any] = list(stages)
    count, ranks = stages[0].num_stages, stages[0].group_size
    if name in _SEVERAL and training and microbatches % max(1, microbatches // ranks) == 0:
        return _SEVERAL[name](own, microbatches, loss_fn=loss, scale_grads=False)
    if name in _SEVERAL or microbatches < count:
        return ScheduleLoopedBFS(own, microbatches, loss_fn=loss, scale_grads=False)
    one = Schedule1F1B if training and name == "1f1b" else ScheduleGPipe
    return one(own[0], microbatches, loss_fn=loss, scale_grads=False)


def _rule(part: StrategyPart, ranks: int) -> str:
    if part.schedule not in _SEVERAL:
        return "as many stages as ranks"
    return f"a multiple of {ranks} stages" + (", at least two a rank" if part.schedule == "interleaved" else "")


def _the_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The last stage has computed it already, with all that it needs to know."""
    return output
