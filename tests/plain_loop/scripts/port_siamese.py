# expect: divided
# One model is called twice in each step.
import torch
import torch.nn.functional as F
from common import convolutions, images, report
from torch import nn
from torch.utils.data import DataLoader


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(convolutions(1, 8), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 16))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


model = Embedding()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
losses = []
for epoch in range(2):
    for x, _ in DataLoader(images(110), batch_size=22, shuffle=True):
        distance = (model(x) - model(x.flip(3))).square().sum(1)
        loss = distance.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
