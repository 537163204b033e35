# expect: divided
# Losses of classes inside the model: class weights, ignored labels, smoothing, margins.
import torch
from common import report, update
from torch import nn


class Classifier(nn.Module):
    def __init__(self, criterion):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
        self.criterion = criterion

    def forward(self, x, y):
        return self.criterion(self.layers(x).log_softmax(1), y)


weight = torch.tensor([0.2, 1.0, 3.0])
criteria = [
    nn.CrossEntropyLoss(weight=weight),
    nn.CrossEntropyLoss(ignore_index=2),
    nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1),
    nn.CrossEntropyLoss(weight=weight, ignore_index=0, label_smoothing=0.2),
    nn.CrossEntropyLoss(reduction="sum"),
    nn.NLLLoss(weight=weight, ignore_index=1),
    nn.MultiMarginLoss(weight=weight),
]
for criterion in criteria:
    model = Classifier(criterion)
    # + model = samestep.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        x, y = torch.randn(11, 6), torch.randint(0, 3, (11,))
        loss = model(x, y)
        losses.append(update(optimizer, loss))
    report(losses, model)
