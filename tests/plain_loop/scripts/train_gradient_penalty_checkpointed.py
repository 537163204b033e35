# expect: error: E_INCOMPATIBLE
# A gradient penalty through a model that computes activations again in the backward, with dropout.
import torch
import torch.nn.functional as F
from common import batches, report, sgd, update
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3))
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=False))


model = Net()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    x.requires_grad_()
    outputs = model(x)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
    loss = F.cross_entropy(outputs, y) + 0.1 * gradient.norm(dim=1).topk(3).values.mean()
    losses.append(update(optimizer, loss))
report(losses, model)
