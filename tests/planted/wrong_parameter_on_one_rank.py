"""Weights are clamped after each step on rank 0 only."""

import torch
from parts import Net, Points, batches_of, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    for batch in batches_of(world, Points()):
        engine.step(batch)
        if world.is_main:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.2, 0.2)
