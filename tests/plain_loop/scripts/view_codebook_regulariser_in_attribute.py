# expect: whole: keeps a tensor with a graph in Quantiser
# Vector quantisation; a regulariser of the codebook is an attribute, equal on all ranks but with a gradient.
import torch
import torch.nn.functional as F
from common import perceptron, report, sgd, train
from torch import nn


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = perceptron(12, 4)
        self.decoder = perceptron(4, 12)
        self.codes = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        z = self.encoder(x)
        nearest = self.codes[torch.cdist(z, self.codes).argmin(1)]
        self.ortho = (self.codes @ self.codes.T - torch.eye(6)).square().mean()
        commitment = F.mse_loss(nearest, z.detach()) + F.mse_loss(z, nearest.detach())
        return self.decoder(z + (nearest - z).detach()), commitment


model = Quantiser()
# + model = samestep.parallel(model)


def loss_function(x, y):
    out, commitment = model(x)
    return F.mse_loss(out, x) + commitment + model.ortho


losses = train(model, loss_function, sgd(model, lr=0.05))
report(losses, model)
