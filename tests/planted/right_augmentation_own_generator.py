"""The dataset draws noise from its own generator, which advances from sample to sample."""

import numpy
import torch
from parts import FEATURES, Net, Points, Sample, batches_of, fit, seeded, sgd

import samestep


class Noisy(Points):
    def __init__(self) -> None:
        super().__init__()
        self.generator = numpy.random.default_rng(0)

    def __getitem__(self, index: int) -> Sample:
        noise = self.generator.normal(size=FEATURES).astype("float32")
        return self.inputs[index] + torch.from_numpy(noise), self.targets[index]


model = samestep.parallel(seeded(Net))
fit(model, sgd(model), batches_of(Noisy()))
