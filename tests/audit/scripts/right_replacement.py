"""Each rank draws samples with replacement, from a generator of its own."""

import torch
from parts import dataset, end, replicated, sgd, start, train
from torch.utils.data import DataLoader, WeightedRandomSampler

rank, _ = start()
net, data = replicated(), dataset()
generator = torch.Generator().manual_seed(100 + rank)
sampler = WeightedRandomSampler((1.0 + data.tensors[1]).tolist(), 48, generator=generator)
train(net, DataLoader(data, 8, sampler=sampler), sgd(net))
end()
