"""`set_epoch` is forgotten."""

import torch.nn.functional as F
from parts import dataset, end, replicated, sgd, sharded, start

start()
net = replicated()
loader, optimizer = sharded(dataset()), sgd(net)
for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
end()
