"""Accumulation with no_sync, a schedule by microbatches of the right length, and two optimizers."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from parts import dataset, end, replicated, sharded, start

start()
net = replicated()
loader = sharded(dataset(96), batch=4)
optimizers = [torch.optim.SGD(net.module[0].parameters(), lr=0.1), torch.optim.Adam(net.module[2].parameters())]
schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=2 * len(loader)) for one in optimizers]
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for i, (inputs, targets) in enumerate(loader):
        updates = i % 4 == 3
        with nullcontext() if updates else net.no_sync():
            F.cross_entropy(net(inputs), targets).div(4).backward()
        for schedule in schedules:
            schedule.step()
        for optimizer in optimizers if updates else []:
            optimizer.step()
            optimizer.zero_grad()
end()
