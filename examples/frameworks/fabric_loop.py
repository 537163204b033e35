"""Training loop with Fabric."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

fabric = lightning.Fabric(accelerator="cpu", devices=1)
fabric.launch()
torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
train, test = random_split(data, [1400, 397])
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
batches, tests = fabric.setup_dataloaders(
    DataLoader(train, batch_size=64), DataLoader(test, batch_size=64)
)

for _ in range(3):
    for inputs, targets in batches:
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()

with torch.no_grad():
    losses = [nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in tests]
fabric.print(f"loss {sum(losses) / len(test):.4f}")
