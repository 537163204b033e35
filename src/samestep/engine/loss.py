"""Losses as a sum and a count, so that a mean is taken once, over the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Loss:
    """The loss of one shard.

    Attributes:
        sum: scalar; the summed loss of the samples (or tokens) of the shard.
        count: how many there were, as a number or a scalar tensor.
    """

    sum: torch.Tensor
    count: torch.Tensor | float


LossFunction = Callable[[Any, Any], Loss | torch.Tensor]


def as_loss(value: Loss | torch.Tensor, samples: int) -> Loss:
    """What a loss function returned, as a sum and a count; a plain scalar means a mean over the shard's samples.

    Raises:
        TypeError: it is neither a `Loss` nor a scalar tensor.
    """
    if isinstance(value, Loss):
        return value
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise TypeError(
            f"the loss function returned a {type(value).__name__}{shape}; "
            "return samestep.Loss(sum, count), or a scalar that is the mean over the shard's samples"
        )
    return Loss(value * samples, samples)


def cross_entropy(
    outputs: torch.Tensor, targets: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Loss:
    """Cross entropy of logits against class numbers, summed, with the count of targets that are not ignored.

    Args:
        outputs: logits, `(N, C)` or `(N, C, ...)`.
        targets: class numbers, `(N)` or `(N, ...)`.
        ignore_index: targets of this value (padding) neither add to the sum nor count.
        label_smoothing: as in `torch.nn.CrossEntropyLoss`.
    """
    total = functional.cross_entropy(
        outputs, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )
    return Loss(total, (targets != ignore_index).sum())
