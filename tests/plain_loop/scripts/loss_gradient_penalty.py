# expect: divided
# WGAN-GP: the critic's gradient at interpolated samples is part of its loss.
import torch
from common import report, update
from torch import nn

critic = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 1))
# + critic = samestep.parallel(critic)
optimizer = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.0, 0.9))
losses = []
for _ in range(8):
    real, fake = torch.randn(11, 6) + 1, torch.randn(11, 6)
    mix = torch.rand(11, 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).pow(2).mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    losses += [update(optimizer, loss), penalty.item()]
report(losses, critic)
