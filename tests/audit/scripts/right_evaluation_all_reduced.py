"""Counts over all samples without padding are reduced."""

import torch.distributed as dist
from parts import count_right, dataset, end, replicated, sgd, sharded, start, train
from torch.utils.data import DataLoader, Subset

rank, size = start()
net = replicated()
train(net, sharded(dataset()), sgd(net))
validation = dataset(37)
counts = count_right(net.module, DataLoader(Subset(validation, range(rank, len(validation), size)), 8))
dist.all_reduce(counts)
assert counts[1] == len(validation)
end()
