# expect: whole: fewer rows than ranks
# Detection: images of different sizes and their targets come as lists.
import torch
import torch.nn.functional as F
from common import report, sgd, update
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.out = nn.Linear(6, 4)

    def forward(self, pictures, targets):
        pooled = [self.conv(picture[None]).amax((0, 2, 3)) for picture in pictures]
        classes = torch.stack([target["label"] for target in targets])
        return {"classes": F.cross_entropy(self.out(torch.stack(pooled)), classes)}


model = Detector()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step in range(10):
    pictures = [torch.randn(1, 6 + (row + step) % 3, 7) for row in range(8)]
    targets = [{"label": torch.tensor(row % 4)} for row in range(8)]
    terms = model(pictures, targets)
    loss = sum(terms.values())
    losses.append(update(optimizer, loss))
report(losses, model)
