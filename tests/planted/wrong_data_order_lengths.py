"""Samples are grouped by lengths that depend on the number of processes."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    data = Points()
    lengths = [index % (5 * world.size) for index in range(len(data))]
    fit(engine, batches_of(world, data, lengths=lengths))
