# expect: whole: changes the attribute generator of Noisy
# The forward draws from three generators that the script or the module owns.
import random

import numpy as np
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn

array_generator = np.random.default_rng(5)
tensor_generator = torch.Generator().manual_seed(2)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.generator = random.Random(3)

    def forward(self, x):
        scale = float(array_generator.uniform(0.5, 1.5))
        shift = 0.1 * torch.randn(12, generator=tensor_generator)
        return self.net(x * scale + shift + self.generator.random())


model = Noisy()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
