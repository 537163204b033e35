"""Order of forwards and backwards of microbatches in pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from samestep.config import StrategyConfig
from samestep.strategies.pipeline.partition import stage_error

Schedule = PipelineScheduleSingle | PipelineScheduleMulti

_MULTI_STAGE = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}


def stage_count(config: StrategyConfig, ranks: int) -> int:
    """Return the number of stages of a pipeline.

    Raises:
        InputError: the named stages do not fit the schedule.
    """
    minimum = 2 * ranks if config.schedule == "interleaved" else ranks
    if not config.stages:
        return minimum
    count = len(config.stages) + 1
    is_multiple = config.schedule in _MULTI_STAGE
    if (count < minimum or count % ranks) if is_multiple else count != ranks:
        rule = f"a multiple of {ranks} stages" if is_multiple else "one stage per rank"
        rule += ", at least two per rank" if config.schedule == "interleaved" else ""
        raise stage_error(
            f"strategy.stages names {count - 1} modules: {count} stages for {ranks} ranks",
            expected=f"{config.schedule}: {rule}",
            fix=f"name {minimum - 1} modules, or remove strategy.stages",
        )
    return count


def build_schedule(name: str, stages: Sequence[PipelineStage], microbatches: int, *, training: bool) -> Schedule:
    """Return torch's schedule of that name, or one without restrictions if it does not support the microbatches."""
    own: Any = stages
    count, ranks = stages[0].num_stages, stages[0].group_size
    kind: Callable[..., Schedule]
    if name in _MULTI_STAGE and training and microbatches % max(1, microbatches // ranks) == 0:
        kind = _MULTI_STAGE[name]
    elif name in _MULTI_STAGE or microbatches < count:
        kind = ScheduleLoopedBFS
    else:
        kind, own = Schedule1F1B if training and name == "1f1b" else ScheduleGPipe, stages[0]
    return kind(own, microbatches, loss_fn=_last_stage_loss if training else None, scale_grads=False)


def _last_stage_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the output of the last stage, which is the loss."""
    return output
