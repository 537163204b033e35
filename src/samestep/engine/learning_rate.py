"""How a learning rate follows the batch size: a function of the global batch, never of a number of devices."""

from __future__ import annotations

import math

import torch

from samestep.config import LearningRatePart, LearningRateRule
from samestep.errors import InputError


def scaled_lr(lr: float, batch_size: int, *, rule: LearningRateRule, base_batch_size: int | None = None) -> float:
    """The rate for `batch_size` where `lr` is right for `base_batch_size`.

    Args:
        batch_size: samples behind one step, over all ranks.
        rule: `fixed`: `lr` itself; `linear`: times `batch_size / base_batch_size` (Goyal et al., "Accurate, large
            minibatch SGD", 2017); `sqrt`: times the root of that (Krizhevsky, "One weird trick", 2014).
        base_batch_size: needed with `linear` and `sqrt`.

    Raises:
        InputError: there is no such rule, or a batch size is missing or below 1.
    """
    base = LearningRatePart(rule=rule, base_batch_size=base_batch_size).base_batch_size
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}", rule="batch_size >= 1", do="give the size of the global batch")
    if base is None:
        return lr
    return lr * batch_size / base if rule == "linear" else lr * math.sqrt(batch_size / base)


def scale_rates(optimizer: torch.optim.Optimizer, batch_size: int, part: LearningRatePart) -> tuple[str, ...]:
    """Scale the rate of every parameter group, given or the optimizer's default; a line for each that is another.

    Raises:
        InputError: the optimizer has no learning rate.
    """
    if part.rule == "fixed":
        return ()
    told = []
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise InputError(
                f"learning_rate.rule is {part.rule} but {type(optimizer).__name__} has no learning rate",
                rule="the optimizer's parameter groups have an lr",
                do="set learning_rate.rule: fixed",
            )
        before = float(group["lr"])
        group["lr"] = scaled_lr(before, batch_size, rule=part.rule, base_batch_size=part.base_batch_size)
        factor = f"{batch_size}/{part.base_batch_size}"
        shown = factor if part.rule == "linear" else f"sqrt({factor})"
        told.append(f"learning rate {group['lr']:.6g} = {before:.6g} x {shown} ({part.rule})")
    return tuple(dict.fromkeys(told))
