# expect: divided
# A generator and a discriminator with two optimizers; fake samples are detached for the first of them.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report
from torch import nn

generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12))
discriminator = perceptron(outputs=1)
# + generator = samestep.parallel(generator)
# + discriminator = samestep.parallel(discriminator)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
ones, zeros = torch.ones(11, 1), torch.zeros(11, 1)
losses = []
for x, _ in batches():
    fake = generator(torch.randn(11, 4))
    loss = F.binary_cross_entropy_with_logits(discriminator(x), ones)
    loss = loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
    discriminator_optimizer.zero_grad()
    loss.backward()
    discriminator_optimizer.step()
    deceived = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
    generator_optimizer.zero_grad()
    deceived.backward()
    generator_optimizer.step()
    losses += [loss.item(), deceived.item()]
report(losses, generator, discriminator)
