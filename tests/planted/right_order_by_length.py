"""Global batches of samples of similar length."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    data = Points()
    lengths = [index * 7 % 23 for index in range(len(data))]
    fit(engine, batches_of(world, data, lengths=lengths))
