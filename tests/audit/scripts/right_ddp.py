"""DistributedSampler with set_epoch, padding, evaluation with counts of rank 0, and a checkpoint of rank 0."""

import torch
import torch.nn.functional as F
from parts import dataset, end, is_main, model, sharded, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

start()
net = DistributedDataParallel(model(nn.BatchNorm1d(16), nn.Dropout(0.1)))
loader, validation = sharded(dataset()), DataLoader(dataset(37), 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    net.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    schedule.step()
    if is_main():
        net.eval()
        with torch.no_grad():
            right = sum(int((net.module(x).argmax(1) == y).sum()) for x, y in validation)
        print(f"accuracy {right / 37:.3f}")
if is_main():
    torch.save(net.module.state_dict(), "model.pt")
end()
