# expect: divided
# Cross entropy plus dice of each class over the batch, as in medical segmentation.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1))
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    image = torch.randn(9, 1, 6, 6)
    mask = (image[:, 0] > 0).long() + (image[:, 0] > 1).long()
    logits = model(image)
    p, one_hot = logits.softmax(1), F.one_hot(mask, 3).permute(0, 3, 1, 2)
    overlap = (p * one_hot).sum((0, 2, 3))
    dice = 1 - (2 * overlap + 1) / (p.sum((0, 2, 3)) + one_hot.sum((0, 2, 3)) + 1)
    loss = F.cross_entropy(logits, mask) + dice.mean()
    losses.append(update(optimizer, loss))
report(losses, model)
