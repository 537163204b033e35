"""Models one after another, which refer to themselves; ranks collect such cycles at different times."""

import gc

from parts import Plain, Points, batches_of, fit, seeded, sgd

import samestep

if samestep.init().rank:
    gc.disable()
for _ in range(2):
    model = samestep.parallel(seeded(Plain))
    model.trainer = [model]
    fit(model, sgd(model), batches_of(Points()))
    del model
