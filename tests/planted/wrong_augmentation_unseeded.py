"""The dataset draws noise from a generator with another seed in each process."""

import numpy
import torch
from parts import FEATURES, Net, Points, Sample, fit, seeded, sgd
from torch.utils.data import DataLoader

import samestep


class Noisy(Points):
    def __init__(self) -> None:
        super().__init__()
        self.generator = numpy.random.default_rng()

    def __getitem__(self, index: int) -> Sample:
        noise = self.generator.normal(size=FEATURES).astype("float32")
        return self.inputs[index] + torch.from_numpy(noise), self.targets[index]


model = samestep.parallel(seeded(Net))
fit(model, sgd(model), DataLoader(Noisy(), batch_size=32))
