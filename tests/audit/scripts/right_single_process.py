"""One process without a group, with a random split and a weighted sampler."""

import torch
from parts import dataset, model, sgd, train
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler, random_split

net = model(nn.BatchNorm1d(16), nn.Dropout(0.2))
first, second = random_split(dataset(), [80, 21])
optimizer = sgd(net)
train(net, DataLoader(first, 8, shuffle=True, drop_last=True), optimizer)
train(net, DataLoader(first, 8, sampler=WeightedRandomSampler([1.0] * 80, 80)), optimizer)
net.eval()
for inputs, _ in DataLoader(second, 8):
    net(inputs)
torch.save(net.state_dict(), "single.pt")
