# expect: divided
# Diffusion: time steps and noise are drawn in the loop, the model takes integers and a table in a buffer.
import math

import torch
from common import report
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        frequency = torch.exp(-math.log(100) * torch.arange(4) / 4)
        self.register_buffer("frequency", frequency, persistent=False)
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
        self.first, self.second = nn.Conv1d(1, 8, 3, padding=1), nn.Conv1d(8, 1, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x, t):
        angle = t[:, None] * self.frequency
        time = self.time(torch.cat([angle.sin(), angle.cos()], dim=1))
        return self.second(torch.relu(self.norm(self.first(x)) + time[:, :, None]))


model = Denoiser()
# + model = samestep.parallel(model)
alpha = torch.linspace(0.99, 0.1, 20)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(10):
    x, t = torch.randn(10, 1, 12), torch.randint(0, 20, (10,))
    noise, keep = torch.randn_like(x), alpha[t][:, None, None]
    loss = (model(keep.sqrt() * x + (1 - keep).sqrt() * noise, t) - noise).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
