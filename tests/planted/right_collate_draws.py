"""Collation mixes samples by numbers of torch's global generator."""

import torch
from parts import Net, Points, Sample, batches_of, fit, seeded, sgd
from torch.utils.data import default_collate

import samestep


def collate(samples: list[Sample]) -> object:
    inputs, targets = default_collate(samples)
    return inputs.lerp(inputs[torch.randperm(len(inputs))], 0.1 * float(torch.rand(()))), targets


model = samestep.parallel(seeded(Net))
fit(model, sgd(model), batches_of(Points(), collate_fn=collate))
