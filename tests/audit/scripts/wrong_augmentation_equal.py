"""All ranks have the same seed, and their loader workers draw the same noise."""

import torch
from parts import Noisy, end, replicated, sgd, start, train
from torch.utils.data import DataLoader, DistributedSampler

start()
torch.manual_seed(0)
net, data = replicated(), Noisy()
train(net, DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=2), sgd(net))
end()
