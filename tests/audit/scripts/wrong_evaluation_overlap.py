"""A sampler of the script lets both ranks evaluate the samples in the middle."""

import torch
import torch.distributed as dist
from parts import dataset, end, replicated, sgd, sharded, start, train
from torch.utils.data import DataLoader

rank, size = start()
net = replicated()
train(net, sharded(dataset()), sgd(net))
validation = dataset(37)
own = range(25) if rank == 0 else range(20, 37)
loss = torch.zeros(2)
net.eval()
with torch.no_grad():
    for inputs, targets in DataLoader(validation, 8, sampler=own):
        total = torch.nn.functional.cross_entropy(net.module(inputs), targets, reduction="sum")
        loss += torch.tensor([total, len(targets)])
dist.reduce(loss, 0)
end()
