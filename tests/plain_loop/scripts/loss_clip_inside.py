# expect: whole: joins samples
# CLIP as in Transformers: the model itself returns the logits between all pairs of the batch.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        logits = self.scale.exp() * F.normalize(self.image(image), dim=1) @ F.normalize(self.text(text), dim=1).T
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        return loss, logits


model = Clip()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    loss, logits = model(torch.randn(11, 6), torch.randn(11, 5))
    losses += [update(optimizer, loss), logits.diagonal().sum().item()]
report(losses, model)
