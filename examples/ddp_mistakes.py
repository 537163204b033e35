"""Script with DistributedDataParallel and three mistakes that `samestep audit` finds. It runs under torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(203, 20)
data = TensorDataset(inputs, inputs[:, :5].argmax(dim=1))
train, test = torch.utils.data.random_split(data, [160, 43])
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(train)

for _ in range(3):  # no sampler.set_epoch
    for batch, targets in DataLoader(train, batch_size=16, sampler=sampler):
        loss = functional.cross_entropy(model(batch), targets)  # one seed: equal masks on all ranks
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

model.eval()
counts = torch.zeros(2)
with torch.no_grad():
    for batch, targets in DataLoader(test, batch_size=16, sampler=DistributedSampler(test)):
        correct = (model(batch).argmax(dim=1) == targets).sum()
        counts += torch.tensor([correct, len(targets)])
dist.all_reduce(counts)  # with the padding of DistributedSampler
if dist.get_rank() == 0:
    print(f"accuracy {counts[0] / counts[1]:.2%} of {counts[1]:.0f} samples")
dist.destroy_process_group()
