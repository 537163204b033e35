"""Rank 0 alone updates the average of the weights, with which all ranks evaluate."""

import copy

import torch
import torch.nn.functional as F
from parts import dataset, end, is_main, replicated, sgd, sharded, start

start()
net = replicated()
average = copy.deepcopy(net.module).eval()
loader, optimizer = sharded(dataset()), sgd(net)
for inputs, targets in loader:
    optimizer.zero_grad()
    F.cross_entropy(net(inputs), targets).backward()
    optimizer.step()
    if is_main():
        for mean, value in zip(average.parameters(), net.module.parameters(), strict=True):
            mean.data.lerp_(value.data, 0.1)
with torch.no_grad():
    for inputs, _ in sharded(dataset(38), shuffle=False):
        average(inputs)
end()
