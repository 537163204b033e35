# expect: divided
# Attributes of the model have one letter, as globals of the script have them, and no batch is short.
import torch
import torch.nn.functional as F
from common import convolutions, images, report
from torch import nn
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = convolutions(1, 8)
        self.o = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        return self.o(self.d(x))


m = Net()
# + m = samestep.parallel(m)
o = torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9)
losses = []
for d in range(2):
    for x, _ in DataLoader(images(41, 1, 8), batch_size=8, shuffle=True, drop_last=True):
        o.zero_grad()
        u = m(x)
        loss = F.binary_cross_entropy_with_logits(u, (x > 0.5).double())
        loss.backward()
        o.step()
        losses.append(loss.item())
report(losses, m)
