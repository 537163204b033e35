# expect: divided
# A term that joins samples in every fourth call only, after calls without it were tried (lazy regularisation).
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.step = 0

    def forward(self, x):
        out = self.net(x)
        self.step += 1
        if self.step % 4 == 0:
            out = out - 0.1 * out.mean(0)
        return out


model = Lazy()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y), count=20)
report(losses, model)
