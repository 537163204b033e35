"""Weights are clamped after each step on every rank; gradients are clipped by their norm."""

import torch
from parts import Net, Points, batches_of, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    config = samestep.StepConfig(clip_norm=0.5)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world, config=config)
    for batch in batches_of(world, Points()):
        engine.step(batch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
