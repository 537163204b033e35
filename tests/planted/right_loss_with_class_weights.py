"""Class weights: the sum of weighted losses and the sum of weights."""

import torch
from losses import weighted
from parts import Net, Points, batches_of, evaluation, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), weighted, world=world)
    fit(engine, batches_of(world, Points()))
    assert torch.isfinite(torch.tensor(engine.evaluate(evaluation(world))["loss"]))
