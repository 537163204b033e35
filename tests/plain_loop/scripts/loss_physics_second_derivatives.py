# expect: mixed
# Physics-informed network: u'' + u = 0 at random points and two boundary values.
import torch
from common import report, update
from torch import nn

net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
# + net = samestep.parallel(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
losses = []
for _ in range(8):
    t = torch.rand(13, 1).requires_grad_()
    u = net(t)
    (du,) = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)
    (d2u,) = torch.autograd.grad(du, t, torch.ones_like(u), create_graph=True)
    loss = (d2u + u).pow(2).mean() + net(torch.zeros(1, 1)).pow(2).mean()
    losses.append(update(optimizer, loss))
report(losses, net)
