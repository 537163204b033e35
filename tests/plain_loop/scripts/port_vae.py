# expect: divided
# The variational autoencoder of pytorch/examples: sampling in the forward, a sum as the loss.
import torch
import torch.nn.functional as F
from common import images, report
from torch import nn
from torch.utils.data import DataLoader


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(100, 32)
        self.mean = nn.Linear(32, 4)
        self.variance = nn.Linear(32, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 100))

    def encode(self, x):
        hidden = F.relu(self.encoder(x))
        return self.mean(hidden), self.variance(hidden)

    def reparameterize(self, mean, variance):
        std = torch.exp(0.5 * variance)
        return mean + torch.randn_like(std) * std

    def forward(self, x):
        mean, variance = self.encode(x)
        sample = self.reparameterize(mean, variance)
        return torch.sigmoid(self.decoder(sample)), mean, variance


def loss_function(reconstruction, x, mean, variance):
    entropy = F.binary_cross_entropy(reconstruction, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + variance - mean.pow(2) - variance.exp())
    return entropy + divergence


model = VAE()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for epoch in range(2):
    for x, _ in DataLoader(images(110), batch_size=22, shuffle=True):
        x = x.flatten(1).sigmoid()
        optimizer.zero_grad()
        reconstruction, mean, variance = model(x)
        loss = loss_function(reconstruction, x, mean, variance)
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / len(x))
report(losses, model)
