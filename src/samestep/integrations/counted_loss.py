"""Losses that are means over items, such as labels, of which a microbatch can have none."""

from __future__ import annotations

import torch

from samestep.engine.loss import Loss


def counted_loss(mean: torch.Tensor, count: float | torch.Tensor) -> Loss:
    """Return the loss of a microbatch from its mean over `count` items; 0 without items, also if the mean is NaN."""
    counts = torch.as_tensor(count, device=mean.device)
    return Loss(torch.where(counts > 0, mean * counts, 0.0), count)
