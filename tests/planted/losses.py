"""Losses of the recipes in this folder."""

import torch
from torch.nn import functional

from samestep import Loss

_WEIGHTS = torch.tensor([0.2, 1.0, 1.0, 5.0])


def weighted_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean of a microbatch, which is not a mean over samples."""
    return functional.cross_entropy(outputs, targets, weight=_WEIGHTS.to(outputs.dtype))


def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> Loss:
    """Return the weighted sum and the summed weights."""
    weights = _WEIGHTS.to(outputs.dtype)
    total = functional.cross_entropy(outputs, targets, weight=weights, reduction="sum")
    return Loss(total, weights[targets].sum())
