"""A layer seeds torch with the rank, so that ranks drop different units."""

import torch
from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep

world = samestep.init()


class RankDropout(nn.Dropout):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            torch.manual_seed(world.rank)
        return super().forward(values)


model = samestep.parallel(seeded(Plain, RankDropout(0.3)))
fit(model, sgd(model), batches_of(Points()))
