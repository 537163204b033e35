"""Losses as a sum and a count, so that the mean is taken once, over the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from samestep.data.batch import GlobalBatch
from samestep.distributed.world import World
from samestep.errors import InputError


@dataclass(frozen=True)
class Loss:
    """Loss of one microbatch.

    Attributes:
        sum: scalar tensor; the summed loss of the samples (or tokens) of the microbatch.
        count: number of samples (or tokens), as a number or a scalar tensor.
    """

    sum: torch.Tensor
    count: torch.Tensor | float


LossFunction = Callable[[Any, Any], Loss | torch.Tensor]


class StepLoss:
    """A loss function as a step and an evaluation use it; the subclass `MultiLoss` has several terms."""

    def __init__(self, function: LossFunction) -> None:
        self._function = function

    @property
    def term_count(self) -> int:
        """Number of terms."""
        return 1

    def global_counts(self, batch: GlobalBatch, world: World) -> list[float]:
        """Return the terms' counts in the global batch, if a step needs them before the first forward; a collective."""
        return []

    def term_losses(self, outputs: Any, targets: Any, samples: int) -> list[Loss]:
        """Return sum and count of each term for one microbatch of `samples` samples."""
        return [as_loss(self._function(outputs, targets), samples)]

    def combine(self, losses: Sequence[Loss], counts: Sequence[float], batch_size: int, samples: int) -> Loss:
        """Return the one loss of a microbatch from its terms and the result of `global_counts`."""
        return losses[0]

    def means(self, sums: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Return `loss` and the mean of each of several terms, from sums and counts over a whole dataset."""
        ((total, count),) = sums
        return {"loss": total / count}


def as_loss(value: Loss | torch.Tensor, samples: int) -> Loss:
    """Return the result of a loss function as a sum and a count; a scalar is the mean over the microbatch's samples.

    Raises:
        TypeError: `value` is neither a `Loss` nor a scalar tensor.
    """
    if isinstance(value, Loss):
        return value
    advice = "return samestep.Loss(sum, count), or a scalar that is the mean over the microbatch's samples"
    return Loss(require_scalar(value, "the loss function", advice) * samples, samples)


def require_scalar(value: object, source: str, advice: str) -> torch.Tensor:
    """Return the result of a loss function if it is a scalar tensor.

    Raises:
        TypeError: it is not; `source` returned `value`, and `advice` is a fix.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise TypeError(f"{source} returned a {type(value).__name__}{shape}; {advice}")


def cross_entropy(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: Sequence[float] | torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Loss:
    """Return the summed cross entropy of logits, with the count for which sum / count is torch's mean.

    Args:
        outputs: logits, `(N, C)` or `(N, C, ...)`.
        targets: class numbers, `(N)` or `(N, ...)`; or probabilities of the shape of the logits.
        weight: one weight per class; a target counts with the weight of its class.
        ignore_index: targets with this value (padding) add nothing to sum and count.
        label_smoothing: as in `torch.nn.CrossEntropyLoss`.

    Raises:
        InputError: the shapes do not match.
    """
    dtype = torch.promote_types(outputs.dtype, torch.float32)  # 16 bits lose accuracy over thousands of terms
    weights = None if weight is None else torch.as_tensor(weight, dtype=dtype, device=outputs.device)
    if weights is not None and weights.shape != outputs.shape[1:2]:
        raise InputError(
            f"the loss has weights of shape {tuple(weights.shape)} for {outputs.shape[1]} classes",
            expected="one weight per class",
            fix=f"pass a list of {outputs.shape[1]} numbers",
            code="E_SHAPE",
        )
    smoothed = partial(functional.cross_entropy, weight=weights, label_smoothing=label_smoothing, reduction="sum")
    if targets.is_floating_point():
        return Loss(smoothed(outputs.to(dtype), targets.to(dtype)), targets.numel() // targets.shape[1])
    if targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        raise InputError(
            f"outputs have the shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}",
            expected="logits (N, C, ...) and class numbers (N, ...)",
            fix="put the classes second: outputs.transpose(1, 2) for (N, T, C)",
            code="E_SHAPE",
        )
    # As rows, because torch has no deterministic CUDA kernel for more dimensions.
    rows = outputs.movedim(1, -1).reshape(-1, outputs.shape[1]).to(dtype)
    numbers = targets.reshape(-1)
    counted = numbers != ignore_index
    count = counted.sum() if weights is None else (weights.double()[numbers.where(counted, 0)] * counted).sum()
    return Loss(smoothed(rows, numbers, ignore_index=ignore_index), count)
