# expect: divided
# SimCLR with one call for both views, joined as published.
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
        return self.net(x)


model = Embedding()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for epoch in range(2):
    for x, _ in DataLoader(images(88), batch_size=22, shuffle=True):
        views = torch.cat([x, x + 0.1 * torch.randn_like(x)])
        features = F.normalize(model(views), dim=1)
        labels = torch.arange(len(x)).repeat(2)
        same = labels[:, None] == labels[None]
        own = torch.eye(len(views), dtype=torch.bool)
        similarity = (features @ features.T)[~own].view(len(views), -1)
        positive = same[~own].view(len(views), -1)
        logits = torch.cat([similarity[positive][:, None], similarity[~positive].view(len(views), -1)], 1)
        loss = F.cross_entropy(logits / 0.07, torch.zeros(len(views), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
