"""A loop that writes checkpoints and resumes from the newest: python right_resume.py FOLDER."""

import sys

from parts import Net, Points, batches_of, evaluation, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    batches = batches_of(world, Points())
    checkpoints = samestep.CheckpointManager(sys.argv[1], engine, batches)
    checkpoints.resume()
    while batches.cursor.epoch < 2:
        for batch in batches:
            engine.step(batch)
            checkpoints.save()
    engine.evaluate(evaluation(world))
