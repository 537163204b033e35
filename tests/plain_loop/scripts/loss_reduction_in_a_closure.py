# expect: divided
# The reduction of a loss inside the model is in a closure, in a nested dict and in a global; each changes in the run.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn

REDUCTION = "mean"


def make_criterion(reduction):
    def criterion(out, y):
        return F.cross_entropy(out, y, reduction=reduction)

    return criterion


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.criterion = make_criterion("mean")
        self.configuration = {"losses": {"distance": {"reduction": "mean"}}}

    def forward(self, x, y):
        out = self.net(x)
        distance = F.l1_loss(out, x[:, :4], **self.configuration["losses"]["distance"])
        return self.criterion(out, y), distance, F.mse_loss(out, x[:, 4:8], reduction=REDUCTION)


model = Model()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.01)
losses = []
for step, (x, y) in enumerate(batches(20)):
    if step == 5:
        model.criterion = make_criterion("sum")
    if step == 10:
        model.configuration["losses"]["distance"]["reduction"] = "sum"
    if step == 15:
        REDUCTION = "sum"
    loss = sum(model(x, y))
    losses.append(update(optimizer, loss))
report(losses, model)
