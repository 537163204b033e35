# expect: divided
# Spectral norm as a parametrization: each forward in training makes a step of power iteration in a buffer.
import torch
from common import report
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

model = nn.Sequential(spectral_norm(nn.Linear(6, 12)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(12, 1)))
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    loss = torch.relu(1 - model(torch.randn(11, 6) + 1)).mean() + torch.relu(1 + model(torch.randn(11, 6))).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
