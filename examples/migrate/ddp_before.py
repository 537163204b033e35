"""Training loop with DistributedDataParallel: `torchrun --standalone --nproc-per-node 2 ddp_before.py`."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if torch.cuda.is_available()
    else torch.device("cpu")
)

torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
train, test = random_split(data, [1400, 397])
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

sampler = DistributedSampler(train, shuffle=False)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(train, batch_size=64 // size, sampler=sampler):
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

with torch.no_grad():  # without DistributedSampler, whose padding would be counted twice
    total = torch.zeros(1, device=device)
    for number, (inputs, targets) in enumerate(DataLoader(test, batch_size=64)):
        if number % size == rank:
            inputs, targets = inputs.to(device), targets.to(device)
            total += nn.functional.cross_entropy(model.module(inputs), targets, reduction="sum")
    dist.all_reduce(total)
if rank == 0:
    print(f"loss {total.item() / len(test):.4f}")
    torch.save(model.module.state_dict(), "digits.pt")
dist.destroy_process_group()
