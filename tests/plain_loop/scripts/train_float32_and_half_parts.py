# expect: divided
# tolerance: permuted
# A body in float32, a head in bfloat16, and a loss in float64.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = perceptron(12, 8).float()
        self.head = nn.Linear(8, 4).bfloat16()

    def forward(self, x):
        return self.head(self.body(x.float()).tanh().bfloat16())


model = Mixed()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x).double(), y))
report(losses, model)
