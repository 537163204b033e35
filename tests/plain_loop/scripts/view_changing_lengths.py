# expect: divided
# Batches of changing lengths and resolutions are one kind of call.
import torch.nn.functional as F
from common import report, train
from torch import nn

model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 4))
# + model = samestep.parallel(model)
step = 0


def loss_function(x, y):
    global step
    step += 1
    length = 6 + step % 5
    rows = len(x) - step % 3
    return F.cross_entropy(model(x[:rows, None, :length]), y[:rows])


losses = train(model, loss_function)
report(losses, model)
