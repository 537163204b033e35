"""A script that sums something of its own over ranks between steps."""

import torch
import torch.distributed as dist
from parts import Net, Points, batches_of, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    for batch in batches_of(world, Points()):
        engine.step(batch)
        seen = torch.tensor([float(sum(part.size for part in batch.parts))])
        dist.all_reduce(seen)
        assert seen.item() == batch.size
