# expect: whole: keeps a tensor with a graph in Linear
# The script regularises a weight that weight norm computes from its parameters in each forward.
import torch
import torch.nn.functional as F
from common import report, train
from torch import nn

model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(12, 16)), nn.Tanh(), nn.Linear(16, 4))
# + model = samestep.parallel(model)


def loss_function(x, y):
    out = model(x)
    return F.cross_entropy(out, y) + 0.1 * model[0].weight.square().mean()


losses = train(model, loss_function)
report(losses, model)
