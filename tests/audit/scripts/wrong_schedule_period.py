"""The period of the schedule counts the batches of an epoch divided by the ranks once too often."""

import torch
import torch.nn.functional as F
from parts import dataset, end, replicated, sgd, sharded, start

_, size = start()
net = replicated()
loader, optimizer = sharded(dataset(96), batch=4), sgd(net)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader) // size)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        schedule.step()
end()
