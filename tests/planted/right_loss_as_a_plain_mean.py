"""A scalar loss that is the mean over the samples of a microbatch."""

from parts import Net, Points, batches_of, evaluation, fit, seeded, sgd
from torch import nn

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), nn.CrossEntropyLoss(label_smoothing=0.1), world=world)
    fit(engine, batches_of(world, Points()))
    engine.evaluate(evaluation(world))
