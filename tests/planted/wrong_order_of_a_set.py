"""The list of samples is made from a set of names, whose order depends on the hash seed of the process."""

from parts import SAMPLES, Net, Points, batches_of, fit, seeded, sgd
from torch.utils.data import Subset

import samestep

names = list({f"sample-{number}" for number in range(SAMPLES)})

model = samestep.parallel(seeded(Net))
fit(model, sgd(model), batches_of(Subset(Points(), [int(name.removeprefix("sample-")) for name in names])))
