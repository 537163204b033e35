"""Losses as a sum and a count, so that a mean is taken once, over the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from samestep.errors import InputError


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
    outputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: Sequence[float] | torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Loss:
    """Cross entropy of logits, summed, with the count that makes sum over count torch's mean.

    Args:
        outputs: logits, `(N, C)` or `(N, C, ...)`.
        targets: class numbers, `(N)` or `(N, ...)`; or probabilities of the shape of the logits.
        weight: one a class; a target then counts as much as its class weighs.
        ignore_index: targets of this value (padding) neither add to the sum nor count.
        label_smoothing: as in `torch.nn.CrossEntropyLoss`.

    Raises:
        InputError: shapes do not fit together.
    """
    dtype = torch.promote_types(outputs.dtype, torch.float32)  # thousands of terms in 16 bits would not add up
    weights = None if weight is None else _class_weights(weight, outputs, dtype)
    smoothed = partial(functional.cross_entropy, weight=weights, label_smoothing=label_smoothing, reduction="sum")
    if targets.is_floating_point():
        return Loss(smoothed(outputs.to(dtype), targets.to(dtype)), targets.numel() // targets.shape[1])
    if targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        raise InputError(
            f"outputs have the shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}",
            rule="logits (N, C, ...) and class numbers (N, ...)",
            do="put the classes second: outputs.transpose(1, 2) for (N, T, C)",
        )
    # In rows, because torch has no deterministic kernel on GPUs for what has more dimensions.
    rows = outputs.movedim(1, -1).reshape(-1, outputs.shape[1]).to(dtype)
    numbers = targets.reshape(-1)
    counted = numbers != ignore_index
    count = counted.sum() if weights is None else (weights.double()[numbers.where(counted, 0)] * counted).sum()
    return Loss(smoothed(rows, numbers, ignore_index=ignore_index), count)


def _class_weights(weight: Sequence[float] | torch.Tensor, outputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    weights = torch.as_tensor(weight, dtype=dtype, device=outputs.device)
    if weights.shape != outputs.shape[1:2]:
        raise InputError(
            f"the loss has weights of shape {tuple(weights.shape)} for {outputs.shape[1]} classes",
            rule="one weight a class",
            do=f"give a list of {outputs.shape[1]} numbers",
        )
    return weights
