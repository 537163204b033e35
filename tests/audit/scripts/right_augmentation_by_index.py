"""Each sample seeds its own augmentation, with two loader workers."""

import torch
from parts import dataset, end, replicated, sgd, start, train
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self):
        self.inputs, self.targets = dataset().tensors

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        torch.manual_seed(index)
        return self.inputs[index] + torch.randn(6), self.targets[index]


start()
torch.manual_seed(0)
net, data = replicated(), Noisy()
loader = DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=2, persistent_workers=True)
train(net, loader, sgd(net))
end()
