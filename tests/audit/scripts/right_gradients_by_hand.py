"""Weights are broadcast and gradients averaged by hand."""

import torch.distributed as dist
import torch.nn.functional as F
from parts import dataset, end, model, sgd, sharded, start

_, size = start()
net = model()
for parameter in net.parameters():
    dist.broadcast(parameter.data, 0)
loader, optimizer = sharded(dataset()), sgd(net)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
end()
