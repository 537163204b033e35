# expect: divided
# Fine-tuning a detector: batch norm stays in evaluation mode while the rest trains, and its weights are frozen.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))

    def train(self, mode=True):
        super().train(mode)
        self.backbone[1].eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


model = Detector()
model.backbone[1].running_var.fill_(2.0)
for p in model.backbone[1].parameters():
    p.requires_grad_(False)
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
losses = []
for _ in range(8):
    model.train()
    x, y = torch.randn(10, 1, 6, 6), torch.randint(0, 3, (10,))
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
    model.eval()
    with torch.no_grad():
        losses.append((model(x).argmax(1) == y).sum().item())
report(losses, model)
