"""The dataset has another number of samples on each rank."""

from parts import SAMPLES, Net, Points, fit, seeded, sgd
from torch.utils.data import DataLoader

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
fit(model, sgd(model), DataLoader(Points(SAMPLES + world.rank, noise=0.0), batch_size=32, shuffle=True))
