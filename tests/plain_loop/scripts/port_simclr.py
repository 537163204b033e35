# expect: divided
# SimCLR: a contrastive loss over both views of the whole batch.
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


def contrastive_loss(first, second, temperature=0.5):
    rows = len(first)
    views = torch.cat([first, second])
    scores = views @ views.T / temperature
    scores = scores.masked_fill(torch.eye(2 * rows, dtype=torch.bool), -1e9)
    partners = torch.cat([torch.arange(rows, 2 * rows), torch.arange(rows)])
    return F.cross_entropy(scores, partners)


model = Embedding()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    for x, _ in DataLoader(images(110), batch_size=22, shuffle=True):
        loss = contrastive_loss(model(x), model(x + 0.1 * torch.randn_like(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
