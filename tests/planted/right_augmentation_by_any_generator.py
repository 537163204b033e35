"""Augmentation with the generators of Python, NumPy and torch, and a loader process."""

import random

import numpy
import torch
from parts import FEATURES, Net, Points, Sample, batches_of, fit, seeded, sgd

import samestep


class Noisy(Points):
    def __getitem__(self, index: int) -> Sample:
        noise = torch.from_numpy(numpy.random.normal(size=FEATURES).astype("float32"))
        return random.uniform(0.9, 1.1) * self.inputs[index] + noise + torch.rand(FEATURES), self.targets[index]


with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Noisy(), num_workers=1))
