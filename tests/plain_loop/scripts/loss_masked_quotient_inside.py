# expect: whole: joins samples
# Masked autoencoder: the sum of errors over the count of masked patches of the whole batch, inside the model.
import torch
from common import report
from torch import nn


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, patches, mask):
        error = (self.net(patches * ~mask) - patches) ** 2
        return (error * mask).sum() / mask.sum()


model = MaskedAutoencoder()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    loss = model(torch.randn(9, 8), torch.rand(9, 8) < 0.4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
