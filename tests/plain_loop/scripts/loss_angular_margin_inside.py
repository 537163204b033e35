# expect: divided
# Classes with an angular margin: the label changes the cosine of its own class, inside the model.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(12, 6)
        self.centers = nn.Parameter(torch.randn(4, 6))

    def forward(self, x, y):
        cosine = F.normalize(self.net(x)) @ F.normalize(self.centers).T
        angle = cosine.clamp(-0.999, 0.999).acos()
        moved = torch.where(F.one_hot(y, 4).bool(), (angle + 0.3).cos(), cosine)
        return F.cross_entropy(8 * moved, y), cosine


model = Margin()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: model(x, y)[0])
report(losses, model)
