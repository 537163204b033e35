"""Collation mixes samples by numbers of torch's global generator."""

import torch
from parts import Net, Points, Sample, batches_of, fit, seeded, sgd
from torch.utils.data import default_collate

import samestep


def collate(samples: list[Sample]) -> object:
    inputs, targets = default_collate(samples)
    return inputs.lerp(inputs[torch.randperm(len(inputs))], 0.1 * float(torch.rand(()))), targets


with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points(), collate_fn=collate))
