"""The mean over the tokens of a microbatch: microbatches with little padding have too little weight."""

from parts import Lines, TokenNet, batches_of, fit, seeded, sgd
from torch import nn

import samestep

with samestep.start() as world:
    model = seeded(TokenNet)
    engine = samestep.Engine(model, sgd(model), nn.CrossEntropyLoss(ignore_index=-100), world=world)
    fit(engine, batches_of(world, Lines()))
