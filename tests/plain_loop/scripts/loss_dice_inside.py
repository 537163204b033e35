# expect: whole: joins samples
# Dice over the whole batch inside the model: a quotient of two sums over all samples.
import torch
from common import report
from torch import nn


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))

    def forward(self, image, mask):
        p = self.net(image).sigmoid()
        return 1 - 2 * (p * mask).sum() / (p.sum() + mask.sum() + 1e-6)


model = Segmenter()
# + model = samestep.parallel(model)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
losses = []
for _ in range(6):
    image = torch.randn(9, 1, 6, 6)
    loss = model(image, (image > 0.5).double())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
