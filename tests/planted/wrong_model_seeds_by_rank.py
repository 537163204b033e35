"""A layer seeds torch with the rank, so that ranks drop different units."""

import torch
from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep


class RankDropout(nn.Dropout):
    def __init__(self, rank: int) -> None:
        super().__init__(0.3)
        self.rank = rank

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            torch.manual_seed(self.rank)
        return super().forward(values)


with samestep.start() as world:
    model = seeded(Plain, RankDropout(world.rank))
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points()))
