"""Training loop with one process per GPU: `samestep run data_parallel_after.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import samestep

torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
train, test = random_split(data, [1400, 397])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = samestep.parallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(3):
    for inputs, targets in DataLoader(train, batch_size=64):
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

with torch.no_grad():
    pairs = ((x.to(device), y.to(device)) for x, y in DataLoader(test, batch_size=64))
    losses = [nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in pairs]
if samestep.is_main():
    print(f"loss {sum(losses) / len(test):.4f}")
    torch.save(model.state_dict(), "digits.pt")
