# expect: divided
# A Wasserstein GAN with gradient penalty: gradients of gradients of the critic.
import torch
from common import images, report
from torch import nn
from torch.utils.data import DataLoader

generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 100), nn.Unflatten(1, (1, 10, 10)))
critic = nn.Sequential(nn.Flatten(), nn.Linear(100, 32), nn.Tanh(), nn.Linear(32, 1))
# + generator = samestep.parallel(generator)
# + critic = samestep.parallel(critic)
critic_optimizer = torch.optim.Adam(critic.parameters(), 1e-3)
generator_optimizer = torch.optim.Adam(generator.parameters(), 1e-3)
losses = []
for epoch in range(2):
    for x, _ in DataLoader(images(120), 24, shuffle=True):
        fake = generator(torch.randn(len(x), 4)).detach()
        share = torch.rand(len(x), 1, 1, 1)
        mixed = (x * share + fake * (1 - share)).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(x).mean() + 10 * penalty
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        generator_loss = -critic(generator(torch.randn(len(x), 4))).mean()
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        losses += [loss.item(), generator_loss.item()]
report(losses, generator, critic)
