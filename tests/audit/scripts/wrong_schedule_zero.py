"""A linear schedule ends after the first of two epochs; the learning rate stays at zero."""

import torch
import torch.nn.functional as F
from parts import dataset, end, replicated, sgd, sharded, start

start()
net = replicated()
loader, optimizer = sharded(dataset(96), batch=4), sgd(net)
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=len(loader))
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        schedule.step()
end()
