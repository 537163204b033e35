"""Each sample seeds its own augmentation, with two loader workers."""

import torch
from parts import Noisy, end, replicated, sgd, start, train
from torch.utils.data import DataLoader, DistributedSampler

start()
torch.manual_seed(0)
net, data = replicated(), Noisy(seeds_samples=True)
loader = DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=2, persistent_workers=True)
train(net, loader, sgd(net))
end()
