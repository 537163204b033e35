"""Each rank seeds its augmentation with its rank."""

import torch
from parts import FEATURES, Net, Points, Sample, batches_of, fit, seeded, sgd

import samestep


class Noisy(Points):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(1000 * self.rank + index)
        return self.inputs[index] + torch.randn(FEATURES, generator=generator), self.targets[index]


with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Noisy(world.rank)))
