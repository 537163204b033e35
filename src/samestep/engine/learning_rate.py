"""Learning rate as a function of the global batch size and the step, never of the number of devices."""

from __future__ import annotations

import math
import warnings
from typing import Literal, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from samestep.config import LearningRateConfig, LearningRateRule
from samestep.data.batch import GlobalBatch
from samestep.distributed.logging import logger
from samestep.errors import InputError

Interval = Literal["step", "epoch"]


def scaled_lr(lr: float, batch_size: int, *, rule: LearningRateRule, base_batch_size: int | None = None) -> float:
    """Return the learning rate for `batch_size`, from the rate for `base_batch_size`.

    Args:
        lr: rate for `base_batch_size`.
        batch_size: samples per step, over all ranks.
        rule: `fixed`: `lr`; `linear`: times `batch_size / base_batch_size` (Goyal et al., "Accurate, large minibatch
            SGD", 2017); `sqrt`: times the square root of that ratio (Krizhevsky, "One weird trick", 2014).
        base_batch_size: required for `linear` and `sqrt`.

    Raises:
        InputError: unknown rule, or a batch size is missing or below 1.
    """
    base = LearningRateConfig(rule=rule, base_batch_size=base_batch_size).base_batch_size
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}", "batch_size >= 1", "pass the size of the global batch")
    if base is None:
        return lr
    return lr * batch_size / base if rule == "linear" else lr * math.sqrt(batch_size / base)


def scale_rates(optimizer: torch.optim.Optimizer, batch_size: int, config: LearningRateConfig) -> tuple[str, ...]:
    """Scale the rate of every parameter group, and return one line of text per changed rate.

    Raises:
        InputError: the optimizer has no learning rate.
    """
    if config.rule == "fixed":
        return ()
    lines = []
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise InputError(
                f"learning_rate.rule is {config.rule} but {type(optimizer).__name__} has no learning rate",
                expected="the optimizer's parameter groups have an lr",
                fix="set learning_rate.rule: fixed",
                code="E_OPTIMIZER",
            )
        before = float(group["lr"])
        group["lr"] = scaled_lr(before, batch_size, rule=config.rule, base_batch_size=config.base_batch_size)
        ratio = f"{batch_size}/{config.base_batch_size}"
        factor = ratio if config.rule == "linear" else f"sqrt({ratio})"
        lines.append(f"learning rate {group['lr']:.6g} = {before:.6g} x {factor} ({config.rule})")
    return tuple(dict.fromkeys(lines))


def apply_schedule(scheduler: LambdaLR) -> None:
    """Set the rates of the next step by the schedule's own functions, instead of those read from a checkpoint."""
    groups = scheduler.optimizer.param_groups
    for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = rate * factor(scheduler.last_epoch)


class ScheduleClock:
    """Steps a scheduler of PyTorch after each optimizer step, or after the last step of each epoch.

    Args:
        scheduler: the scheduler; None for no schedule. `ReduceLROnPlateau` needs a value and is stepped by the loop.
        interval: unit in which the scheduler counts; required with a scheduler.
        is_main: this rank prints warnings.

    Raises:
        InputError: the interval is missing or unknown, or `ReduceLROnPlateau` is to count optimizer steps.
    """

    def __init__(self, scheduler: LRScheduler | None, interval: Interval | None, *, is_main: bool) -> None:
        self._scheduler, self._interval = scheduler, interval
        if scheduler is None and interval is None:
            return
        name = type(scheduler).__name__
        is_plateau = isinstance(scheduler, ReduceLROnPlateau)
        if scheduler is None or interval not in get_args(Interval) or (is_plateau and interval == "step"):
            raise InputError(
                f"the scheduler is {name if scheduler else None} and scheduler_interval is {interval!r}",
                expected="scheduler_interval='epoch' for ReduceLROnPlateau, which the loop steps with the value of an "
                "evaluation"
                if is_plateau
                else "with a scheduler: 'epoch' if T_max, step_size or milestones count epochs, 'step' if they count "
                "optimizer steps",
                fix="samestep.Engine(..., scheduler=scheduler, scheduler_interval='epoch')",
                code="E_OPTIMIZER",
            )
        self._period = _shortest_period(scheduler) if interval == "step" and is_main else None

    def end_step(self, batch: GlobalBatch, step: int) -> None:
        """Step the scheduler if the interval ends with `batch`, the batch of optimizer step `step`."""
        scheduler = self._scheduler
        ends_epoch = batch.end.epoch > batch.begin.epoch
        if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
            return
        if self._interval == "step" or ends_epoch:
            with warnings.catch_warnings():
                # Raised if the first update was skipped; the schedule counts skipped steps on purpose.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                scheduler.step()
        if self._period is not None and self._period[1] < step and batch.end.epoch == 0:
            self._warn_of_period(*self._period)

    def _warn_of_period(self, name: str, value: int) -> None:
        self._period = None
        logger.warning(
            f"{type(self._scheduler).__name__}({name}={value}) has passed {name} within the first epoch, after {value} "
            f"optimizer steps. If {name} counts epochs: samestep.Engine(..., scheduler_interval='epoch')"
        )


def _shortest_period(scheduler: LRScheduler) -> tuple[str, int] | None:
    """Return the name and the value of the argument that gives the length of a schedule, if there is one."""
    for name, value in (
        ("T_max", getattr(scheduler, "T_max", None)),
        ("step_size", getattr(scheduler, "step_size", None)),
        ("milestones", max(getattr(scheduler, "milestones", None) or [], default=None)),
    ):
        if isinstance(value, int):
            return name, value
    return None
