"""The forward of the inner module skips the reduction."""

import torch.nn.functional as F
from parts import dataset, end, replicated, sgd, sharded, start

start()
net = replicated()
loader, optimizer = sharded(dataset()), sgd(net)
for inputs, targets in loader:
    optimizer.zero_grad()
    F.cross_entropy(net.module(inputs), targets).backward()
    optimizer.step()
end()
