# expect: whole: joins samples
# The loss is a quotient of two sums inside of the model, over a random mask.
import torch
from common import images, report
from torch import nn
from torch.utils.data import DataLoader


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(100, 32), nn.GELU(), nn.Linear(32, 100))

    def forward(self, x):
        mask = (torch.rand(x.shape) < 0.75).double()
        error = (self.net(x * (1 - mask)) - x).square()
        return (error * mask).sum() / mask.sum()


model = MaskedAutoencoder()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for epoch in range(2):
    for x, _ in DataLoader(images(110), batch_size=22, shuffle=True):
        optimizer.zero_grad()
        loss = model(x.flatten(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
