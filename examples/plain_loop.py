"""Plain training loop with one added line. On several processes, the work of the model is divided."""

import torch
from torch import nn
from torch.nn import functional

import samestep

torch.manual_seed(0)
inputs = torch.randn(1000, 20)
targets = inputs[:, :5].argmax(dim=1)
model = nn.Sequential(
    nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5)
)
model = samestep.parallel(model)  # the added line
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(5):
    for rows in torch.randperm(1000).split(64):
        loss = functional.cross_entropy(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

model.eval()
with torch.no_grad():
    accuracy = (model(inputs).argmax(dim=1) == targets).float().mean()
print(f"loss {loss:.4f}, accuracy {accuracy:.2%}")
