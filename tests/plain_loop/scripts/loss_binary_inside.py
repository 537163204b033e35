# expect: divided
# Losses of several labels per sample inside the model, one of them by hand: focal loss.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Tagger(nn.Module):
    def __init__(self, criterion):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
        self.criterion = criterion

    def forward(self, x, y):
        scores = self.layers(x)
        if isinstance(self.criterion, nn.BCELoss):
            scores = scores.sigmoid()
        return self.criterion(scores, y)


def focal(scores, y):
    cross_entropy = F.binary_cross_entropy_with_logits(scores, y, reduction="none")
    return (0.25 * (1 - torch.exp(-cross_entropy)) ** 2 * cross_entropy).mean()


weight = torch.tensor([1.0, 2.0, 0.5, 4.0])
criteria = [
    nn.BCELoss(),
    nn.BCELoss(weight=weight),
    nn.BCEWithLogitsLoss(pos_weight=weight),
    nn.MultiLabelSoftMarginLoss(weight=weight),
    nn.MultiLabelMarginLoss(),
    nn.SoftMarginLoss(),
    nn.HingeEmbeddingLoss(margin=0.7),
    focal,
]
for criterion in criteria:
    model = Tagger(criterion)
    # + model = samestep.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        x = torch.randn(11, 6)
        y = (x[:, :4] > 0).double()
        if isinstance(criterion, nn.MultiLabelMarginLoss):
            y = torch.argsort(x[:, :4], dim=1)
            y[:, 2:] = -1
        elif isinstance(criterion, nn.SoftMarginLoss | nn.HingeEmbeddingLoss):
            y = 2 * y - 1
        loss = model(x, y)
        losses.append(update(optimizer, loss))
    report(losses, model)
