# expect: divided
# A kernel for each sample, applied by moving the batch into the groups of one convolution.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Dynamic(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernels = nn.Linear(2, 2 * 2 * 9)
        self.head = nn.Linear(2 * 36, 3)

    def forward(self, x):
        batch = len(x)
        kernels = self.kernels(x.mean((2, 3))).view(batch * 2, 2, 3, 3)
        x = F.conv2d(x.reshape(1, batch * 2, 6, 6), kernels, padding=1, groups=batch)
        return self.head(torch.tanh(x).view(batch, -1))


model = Dynamic()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    loss = F.cross_entropy(model(torch.randn(9, 2, 6, 6)), torch.randint(0, 3, (9,)))
    losses.append(update(optimizer, loss))
report(losses, model)
