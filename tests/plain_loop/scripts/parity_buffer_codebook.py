# expect: whole: writes codes differently for a part of the rows
# A codebook in buffers moves by counts and sums of the batch.
import torch
import torch.nn.functional as F
from common import report, train
from torch import nn


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(12, 4)
        self.decoder = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("counts", torch.ones(8))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        hidden = self.encoder(x)
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        quantised = self.codes[nearest]
        with torch.no_grad():
            chosen = F.one_hot(nearest, 8).double()
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.T @ hidden, alpha=0.1)
            self.codes.copy_(self.sums / self.counts[:, None])
        return self.decoder(hidden + (quantised - hidden).detach())


model = Quantiser()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
