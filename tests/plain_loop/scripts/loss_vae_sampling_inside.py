# expect: divided
# Variational autoencoder: noise is drawn inside the model, the sum of its losses in the loop.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z).sigmoid(), mean, log_variance


model = Vae()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(10):
    x = torch.rand(11, 12)
    image, mean, log_variance = model(x)
    kl = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    loss = F.binary_cross_entropy(image, x, reduction="sum") + kl
    losses.append(update(optimizer, loss))
report(losses, model)
