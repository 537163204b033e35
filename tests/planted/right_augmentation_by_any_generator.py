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


model = samestep.parallel(seeded(Net))
fit(model, sgd(model), batches_of(Noisy(), num_workers=1))
