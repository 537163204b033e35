"""Collation adds noise from its own generator, which advances from microbatch to microbatch."""

import torch
from parts import Net, Points, Sample, batches_of, fit, seeded, sgd
from torch.utils.data import default_collate

import samestep

generator = torch.Generator().manual_seed(0)


def collate(samples: list[Sample]) -> object:
    inputs, targets = default_collate(samples)
    return inputs + torch.randn(inputs.shape, generator=generator), targets


with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points(), collate_fn=collate))
