# expect: divided
# The regression of pytorch/examples: the script updates the parameters itself, and stops at a threshold.
import torch
import torch.nn.functional as F
from common import report
from torch import nn

weight = torch.randn(4, 1) * 5
bias = torch.randn(1) * 5


def get_batch(size=32):
    values = torch.randn(size)
    x = torch.stack([values**power for power in range(1, 5)], 1)
    return x, x @ weight + bias


model = nn.Linear(4, 1)
# + model = samestep.parallel(model)
losses = []
for step in range(40):
    x, y = get_batch()
    model.zero_grad()
    output = F.smooth_l1_loss(model(x), y)
    loss = output.item()
    output.backward()
    for parameter in model.parameters():
        parameter.data.add_(-0.1 * parameter.grad)
    losses.append(loss)
    if loss < 1e-3:
        break
report(losses, model)
