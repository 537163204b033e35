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


world = samestep.init()
model = samestep.parallel(seeded(Net))
fit(model, sgd(model), batches_of(Noisy(world.rank)))
