"""A loss that compares each sample with the others of its microbatch."""

import torch
from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch.nn import functional

import samestep


def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
    """Classify each sample as itself among the samples of its microbatch."""
    directions = functional.normalize(outputs, dim=1)
    similarity = directions @ directions.T / 0.5
    return samestep.Loss(
        functional.cross_entropy(similarity, torch.arange(len(outputs)), reduction="sum"), len(outputs)
    )


with samestep.start() as world:
    model = seeded(Plain)
    engine = samestep.Engine(model, sgd(model), contrastive, world=world)
    fit(engine, batches_of(world, Points()))
