"""A loop that writes checkpoints and resumes from the newest: python right_resume.py FOLDER."""

import sys

from parts import Net, Points, accuracy, batches_of, evaluation, seeded, sgd, step

import samestep

model = samestep.parallel(seeded(Net))
batches = batches_of(Points())
optimizer = sgd(model)
checkpoints = samestep.CheckpointManager(sys.argv[1], model, batches, optimizer=optimizer)
checkpoints.resume()
for _ in samestep.epochs(batches, 2):
    for batch in batches:
        step(model, optimizer, batch)
        checkpoints.save()
    accuracy(model, evaluation())
    model.train()
