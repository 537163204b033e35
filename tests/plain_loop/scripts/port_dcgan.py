# expect: divided
# The DCGAN of pytorch/examples: two models, two optimizers, batch norm in both.
import torch
from common import images, report
from torch import nn
from torch.utils.data import DataLoader

generator = nn.Sequential(
    nn.ConvTranspose2d(8, 8, 4, 1, 0, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
discriminator = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8, 16, 4, 2, 1, bias=False),
    nn.BatchNorm2d(16),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 2, 1, 0, bias=False),
    nn.Sigmoid(),
    nn.Flatten(0),
)
# + generator = samestep.parallel(generator)
# + discriminator = samestep.parallel(discriminator)
criterion = nn.BCELoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.0002, betas=(0.5, 0.999))
losses = []
for epoch in range(2):
    for real, _ in DataLoader(images(80, 1, 8), 16, shuffle=True):
        discriminator.zero_grad()
        ones = torch.ones(len(real))
        error_real = criterion(discriminator(real), ones)
        error_real.backward()
        noise = torch.randn(len(real), 8, 1, 1)
        fake = generator(noise)
        error_fake = criterion(discriminator(fake.detach()), 1 - ones)
        error_fake.backward()
        optimizer_d.step()
        generator.zero_grad()
        error = criterion(discriminator(fake), ones)
        error.backward()
        optimizer_g.step()
        losses += [error_real.item(), error_fake.item(), error.item()]
report(losses, generator, discriminator)
