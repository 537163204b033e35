"""Learning rate as a function of the global batch size and the step, never of the number of devices."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from samestep.config import LearningRateConfig, LearningRateRule
from samestep.errors import InputError


def scaled_lr(
    lr: float, batch_size: int, *, rule: LearningRateRule, base_batch_size: int | None = None
) -> float:
    """Return the learning rate for `batch_size`, from the rate for `base_batch_size`.

    Args:
        lr: rate for `base_batch_size`.
        batch_size: samples per step, over all ranks.
        rule: `fixed`: `lr`; `linear`: times `batch_size / base_batch_size` (Goyal et al.,
            "Accurate, large minibatch SGD", 2017); `sqrt`: times the square root of that ratio
            (Krizhevsky, "One weird trick", 2014).
        base_batch_size: required for `linear` and `sqrt`.

    Raises:
        InputError: unknown rule, or a batch size is missing or below 1.
    """
    base = LearningRateConfig(rule=rule, base_batch_size=base_batch_size).base_batch_size
    if batch_size < 1:
        raise InputError(
            f"batch_size is {batch_size}", "batch_size >= 1", "pass the size of the global batch"
        )
    if base is None:
        return lr
    if rule == "linear":
        return lr * batch_size / base
    return lr * math.sqrt(batch_size / base)


def scale_rates(
    optimizer: torch.optim.Optimizer, batch_size: int, config: LearningRateConfig
) -> tuple[str, ...]:
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
        group["lr"] = scaled_lr(
            before, batch_size, rule=config.rule, base_batch_size=config.base_batch_size
        )
        ratio = f"{batch_size}/{config.base_batch_size}"
        factor = ratio if config.rule == "linear" else f"sqrt({ratio})"
        lines.append(f"learning rate {group['lr']:.6g} = {before:.6g} x {factor} ({config.rule})")
    return tuple(dict.fromkeys(lines))


def apply_schedule(scheduler: LambdaLR) -> None:
    """Set the rates of the next step by the schedule's own functions, instead of those read from a checkpoint."""
    groups = scheduler.optimizer.param_groups
    for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = rate * factor(scheduler.last_epoch)
