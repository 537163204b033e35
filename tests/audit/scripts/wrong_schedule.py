"""The schedule counts microbatches, and its period counts optimizer steps."""

import torch
import torch.nn.functional as F
from parts import dataset, end, replicated, sgd, sharded, start

start()
net = replicated()
loader, optimizer = sharded(dataset(96), batch=4), sgd(net)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader) // 4)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for i, (inputs, targets) in enumerate(loader):
        F.cross_entropy(net(inputs), targets).div(4).backward()
        schedule.step()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
end()
