# expect: divided
# Domain adaptation: the gradient of the domain's classifier is reversed by a factor that grows with the step.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd
from torch import nn


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return -ctx.factor * slope, None


class Adapting(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(12, 8), nn.Tanh())
        self.classes = nn.Linear(8, 4)
        self.domain = perceptron(8, 2)

    def forward(self, x, factor):
        features = self.features(x)
        return self.classes(features), self.domain(Reverse.apply(features, factor))


model = Adapting()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    classes, domain = model(x, torch.tensor(step / 10))
    loss = F.cross_entropy(classes, y) + F.cross_entropy(domain, (x[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
