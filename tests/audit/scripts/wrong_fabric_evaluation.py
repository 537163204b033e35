"""The padding of Fabric's sampler is part of the accuracy."""

import torch
from fabric_parts import start, train
from parts import dataset
from torch.utils.data import DataLoader

fabric, net, optimizer, loader = start()
net, optimizer = fabric.setup(net, optimizer)
loader, validation = fabric.setup_dataloaders(loader, DataLoader(dataset(37), 8))
train(fabric, net, optimizer, loader)
net.eval()
right = count = 0
with torch.no_grad():
    for inputs, targets in validation:
        right += int((net(inputs).argmax(1) == targets).sum())
        count += len(targets)
right, count = fabric.all_reduce(torch.tensor([right, count]), reduce_op="sum")
fabric.print(f"accuracy {right / count:.3f}")
