# expect: mixed: joins samples
# After some steps a switch of the script, or a counter in a buffer, lets the model join samples.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn


class Switched(nn.Module):
    def __init__(self, warmup):
        super().__init__()
        self.net = perceptron()
        self.mix = nn.Linear(4, 4)
        self.is_mixing = False
        self.warmup = warmup
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x):
        self.step += 1
        out = self.net(x)
        if self.is_mixing or self.step > self.warmup:
            return out + self.mix(out - out.mean(0))
        return out


for warmup in (5, 100):
    model = Switched(warmup)
    # + model = samestep.parallel(model)
    optimizer = sgd(model)
    losses = []
    for step, (x, y) in enumerate(batches()):
        model.is_mixing = warmup == 100 and step > 4
        losses.append(update(optimizer, F.cross_entropy(model(x), y)))
    report(losses, model)
