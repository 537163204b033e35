"""A loss that compares each sample with the others of its batch."""

import torch
from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch.nn import functional

import samestep


def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Classify each sample as itself among the samples of its batch."""
    directions = functional.normalize(outputs, dim=1)
    return functional.cross_entropy(directions @ directions.T / 0.5, torch.arange(len(outputs)))


model = samestep.parallel(seeded(Plain))
fit(model, sgd(model), batches_of(Points()), loss=contrastive)
