"""The training of `plain.py` with DistributedDataParallel, added as PyTorch's tutorial shows. Start with torchrun.

https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html: the batch size of the loader stays, and so does
the learning rate.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EVERY = 128  # samples between evaluations

dist.init_process_group("gloo")
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
inputs = torch.as_tensor(images / 16).float().reshape(-1, 1, 8, 8)
targets = torch.as_tensor(labels)
training = TensorDataset(inputs[:1280], targets[:1280])
model = DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16 * 4 * 4, 10),
    )
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
sampler = DistributedSampler(training)
seen = 0

for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch, target in DataLoader(training, batch_size=32, sampler=sampler):
        model.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
        seen += len(batch) * dist.get_world_size()
        if seen % EVERY == 0 and dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                loss = nn.functional.cross_entropy(model.module(inputs[1280:]), targets[1280:])
            print(f"{seen} {loss:.6f}")
dist.destroy_process_group()
