"""All ranks draw the same samples with replacement."""

import torch
from parts import dataset, end, replicated, sgd, start, train
from torch.utils.data import DataLoader, WeightedRandomSampler

start()
net, data = replicated(), dataset()
generator = torch.Generator().manual_seed(100)
sampler = WeightedRandomSampler((1.0 + data.tensors[1]).tolist(), 48, generator=generator)
train(net, DataLoader(data, 8, sampler=sampler), sgd(net))
end()
