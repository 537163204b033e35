"""Script with a mistake: the learning rate is multiplied by the number of processes, as for a larger batch."""

import torch
from torch import nn

import samestep

world = samestep.init()
torch.manual_seed(0)
inputs = torch.randn(200, 8)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
model = samestep.parallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world.size)

for rows, targets in samestep.loader(data, batch_size=64, shuffle=True):
    loss = nn.functional.cross_entropy(model(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
