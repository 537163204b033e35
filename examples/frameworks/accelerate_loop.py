"""Training loop with Accelerate."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

accelerator = Accelerator()
torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
train, test = random_split(data, [1400, 397])
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches, tests = DataLoader(train, batch_size=64), DataLoader(test, batch_size=64)
model, optimizer, batches, tests = accelerator.prepare(model, optimizer, batches, tests)

for _ in range(3):
    for inputs, targets in batches:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()

with torch.no_grad():
    pairs = [accelerator.gather_for_metrics((model(x), y)) for x, y in tests]
    losses = [nn.functional.cross_entropy(x, y, reduction="sum") for x, y in pairs]
accelerator.print(f"loss {sum(losses) / len(test):.4f}")
