"""RealNVP on two moons: affine couplings, log-determinants, activation norm set by the first batch, samples."""

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import make_moons
from torch import distributions

torch.manual_seed(0)
np.random.seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class ActNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(dim))
        self.shift = nn.Parameter(torch.zeros(dim))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x):
        if not self.initialized:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.log_scale.copy_(-torch.log(x.std(0) + 1e-6))
                self.initialized.fill_(True)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum().expand(len(x))

    def inverse(self, z):
        return z * (-self.log_scale).exp() - self.shift


class Coupling(nn.Module):
    def __init__(self, mask, hidden=32):
        super().__init__()
        self.register_buffer("mask", mask)
        self.scale = nn.Sequential(nn.Linear(2, hidden), nn.LeakyReLU(), nn.Linear(hidden, 2), nn.Tanh())
        self.translate = nn.Sequential(nn.Linear(2, hidden), nn.LeakyReLU(), nn.Linear(hidden, 2))

    def forward(self, x):
        kept = x * self.mask
        s = self.scale(kept) * (1 - self.mask)
        t = self.translate(kept) * (1 - self.mask)
        return kept + (1 - self.mask) * (x * torch.exp(s) + t), s.sum(dim=1)

    def inverse(self, z):
        kept = z * self.mask
        s = self.scale(kept) * (1 - self.mask)
        t = self.translate(kept) * (1 - self.mask)
        return kept + (1 - self.mask) * (z - t) * torch.exp(-s)


class RealNVP(nn.Module):
    def __init__(self, prior, length=4):
        super().__init__()
        self.prior = prior
        masks = torch.tensor([[0.0, 1.0], [1.0, 0.0]] * (length // 2))
        layers = []
        for mask in masks:
            layers += [ActNorm(2), Coupling(mask)]
        self.layers = nn.ModuleList(layers)

    def log_prob(self, x):
        log_det = x.new_zeros(x.shape[0])
        for layer in self.layers:
            x, contribution = layer(x)
            log_det = log_det + contribution
        return self.prior.log_prob(x) + log_det

    @torch.no_grad()
    def sample(self, count):
        z = self.prior.sample((count,))
        for layer in reversed(self.layers):
            z = layer.inverse(z)
        return z


prior = distributions.MultivariateNormal(torch.zeros(2, device=device), torch.eye(2, device=device))
flow = RealNVP(prior).to(device)
optimizer = torch.optim.Adam([p for p in flow.parameters() if p.requires_grad], lr=5e-3)
for t in range(40):
    noisy_moons = make_moons(n_samples=50, noise=0.05)[0]
    loss = -flow.log_prob(torch.Tensor(noisy_moons).to(device)).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    if t % 8 == 0:
        print(f"iter {t}: loss = {loss.item():.3f}")

test_data = torch.Tensor(make_moons(n_samples=200, noise=0.05)[0]).to(device)
with torch.no_grad():
    print(f"test log-likelihood: {flow.log_prob(test_data).mean().item():.3f}")
samples = flow.sample(150).cpu().numpy()
print("mean of samples:", samples.mean(axis=0).round(3), "std:", samples.std(axis=0).round(3))
