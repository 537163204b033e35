"""`examples/digits.py` with DistributedDataParallel, as in tutorials: each process has the batch size of the script."""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
train, test = torch.utils.data.random_split(data, [1437, 360])
model = nn.Sequential(
    nn.Conv2d(1, 24, 3, padding=1),
    nn.BatchNorm2d(24),
    nn.ReLU(),
    nn.Conv2d(24, 48, 3, padding=1),
    nn.BatchNorm2d(48),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(192, 10),
)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
sampler = DistributedSampler(train)

for epoch in range(int(sys.argv[1])):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, targets in DataLoader(train, batch_size=128, sampler=sampler):
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    if dist.get_rank() == 0:
        inputs, targets = (torch.stack(list(column)) for column in zip(*test, strict=True))
        with torch.no_grad():
            outputs = model.module(inputs)
        accuracy = (outputs.argmax(dim=1) == targets).float().mean()
        loss = functional.cross_entropy(outputs, targets)
        print(f"epoch {epoch + 1:2}  test loss {loss:.4f}  accuracy {accuracy:.2%}", flush=True)
    dist.barrier()
dist.destroy_process_group()
