"""A script that issues its own all-reduce between steps."""

import torch
import torch.distributed as dist
from parts import Net, Points, batches_of, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    for batch in batches_of(world, Points()):
        engine.step(batch)
        count = torch.tensor([float(sum(microbatch.size for microbatch in batch.local_microbatches))])
        dist.all_reduce(count)
        assert count.item() == batch.size
