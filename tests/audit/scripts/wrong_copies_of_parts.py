"""As `wrong_copies.py`, with seeds and parts of the data by rank, and an accumulation of gradients."""

import os

import torch
import torch.nn.functional as F
from parts import BATCH, dataset, model
from torch.utils.data import DataLoader, Subset

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(rank)
net = model()
optimizer = torch.optim.AdamW(net.parameters())
for i, (inputs, targets) in enumerate(DataLoader(Subset(dataset(96), range(rank, 96, size)), BATCH)):
    F.cross_entropy(net(inputs), targets).div(2).backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
