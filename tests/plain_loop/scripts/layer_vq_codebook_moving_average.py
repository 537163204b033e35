# expect: whole: writes
# VQ-VAE 2: the codes are moving averages of the samples that chose them, written in the forward.
import torch
from common import report
from torch import nn
from torch.nn import functional as F


class Quantizer(nn.Module):
    def __init__(self, codes=5, width=4, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z):
        one_hot = F.one_hot(torch.cdist(z, self.codes).argmin(1), len(self.codes)).to(z)
        code = one_hot @ self.codes
        if self.training:
            with torch.no_grad():
                self.counts.mul_(self.decay).add_(one_hot.sum(0), alpha=1 - self.decay)
                self.sums.mul_(self.decay).add_(one_hot.T @ z, alpha=1 - self.decay)
                self.codes.copy_(self.sums / self.counts[:, None])
        return z + (code - z).detach(), F.mse_loss(z, code.detach())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantizer, self.decoder = nn.Linear(8, 4), Quantizer(), nn.Linear(4, 8)

    def forward(self, x):
        z, loss = self.quantizer(self.encoder(x))
        return self.decoder(z), loss


model = Model()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    x = torch.randn(11, 8)
    out, commitment = model(x)
    loss = F.mse_loss(out, x) + 0.25 * commitment
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
