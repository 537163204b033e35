# expect: whole: draws random numbers per row outside of torch | its operations depend on the rows
# NumPy draws a number per row in the forward.
import numpy as np
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        factors = torch.from_numpy(np.random.rand(len(x), 1))
        return self.net(x * factors)


model = Noisy()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y) * float(np.random.rand()))
report(losses, model)
