# expect: divided
# VQ-VAE: nearest codes, straight-through gradient, and the losses of codes returned with the image.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Vq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.codes = nn.Embedding(6, 4)

    def forward(self, x):
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(1)
        code = self.codes(nearest)
        loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return self.decoder(z + (code - z).detach()), loss, nearest


model = Vq()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(10):
    x = torch.randn(11, 8)
    out, code_loss, nearest = model(x)
    loss = F.mse_loss(out, x) + code_loss
    losses += [update(optimizer, loss), len(nearest.unique())]
report(losses, model)
