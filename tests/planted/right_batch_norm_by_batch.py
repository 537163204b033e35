"""Batch norm per microbatch after a convolution."""

from parts import Points, Sample, batches_of, fit, seeded, sgd
from torch import nn

import samestep


class Signals(Points):
    def __getitem__(self, index: int) -> Sample:
        values, target = super().__getitem__(index)
        return values.view(3, 4), target


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(32, 4))


model = samestep.parallel(seeded(ConvNet))
fit(model, sgd(model), batches_of(Signals()))
