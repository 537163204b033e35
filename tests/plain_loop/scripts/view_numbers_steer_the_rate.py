# expect: whole: changes the global variable seen
# The forward keeps numbers in a list of the script, which set the learning rate.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd
from torch import nn

seen = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        out = self.net(x)
        seen.append(out.abs().mean().item())
        return out


model = Net()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.param_groups[0]["lr"] = 0.2 / (1 + seen[-1])
    optimizer.step()
    losses.append(loss.item())
report(losses + seen, model)
