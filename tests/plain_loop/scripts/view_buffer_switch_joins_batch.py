# expect: mixed: joins samples
# After some steps a counter in a buffer lets the model join samples.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x):
        self.step += 1
        out = self.net(x)
        if self.step > 5:
            return out + self.mix(out - out.mean(0))
        return out


model = Switched()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
