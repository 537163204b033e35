"""Training loop for samestep run and torchrun: `torchrun --standalone --nproc-per-node 2 ddp_after.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import samestep

device = samestep.init().device

torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
train, test = random_split(data, [1400, 397])
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(3):
    for inputs, targets in DataLoader(train, batch_size=64):
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

with torch.no_grad():
    total = torch.zeros(1, device=device)
    for inputs, targets in DataLoader(test, batch_size=64):
        inputs, targets = inputs.to(device), targets.to(device)
        total += nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
if samestep.is_main():
    print(f"loss {total.item() / len(test):.4f}")
    torch.save(model.state_dict(), "digits.pt")
