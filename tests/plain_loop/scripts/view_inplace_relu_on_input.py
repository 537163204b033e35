# expect: whole: writes into an argument
# The first layer writes into the batch, which the loss reads afterwards.
import torch.nn.functional as F
from common import report, train
from torch import nn

model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, 12))
# + model = samestep.parallel(model)


def loss_function(x, y):
    return F.mse_loss(model(x), x)


losses = train(model, loss_function)
report(losses, model)
