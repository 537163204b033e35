"""A sampler of ranks, as with a process group of the script's own."""

from parts import Net, Points, fit, seeded, sgd
from torch.utils.data import DataLoader, DistributedSampler

import samestep

world = samestep.init()
points = Points()
sampler = DistributedSampler(points, num_replicas=world.size, rank=world.rank, shuffle=False)
model = samestep.parallel(seeded(Net))
fit(model, sgd(model), DataLoader(points, batch_size=32, sampler=sampler))
