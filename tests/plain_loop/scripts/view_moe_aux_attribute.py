# expect: whole: keeps a tensor
# A mixture of experts leaves its auxiliary loss in an attribute.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(12, 3)
        self.experts = nn.ModuleList([perceptron() for _ in range(3)])

    def forward(self, x):
        weights = self.gate(x).softmax(1)
        self.aux = 3 * weights.mean(0).square().sum()
        parts = [weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)]
        return sum(parts)


model = Experts()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y) + model.aux)
report(losses, model)
