# expect: divided
# Python's generator decides in the forward between the target and the own prediction.
import random

import torch
import torch.nn.functional as F
from common import report, train
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(1, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        hidden = x.new_zeros(len(x), 8)
        value = x[:, :1]
        predictions = []
        for position in range(1, 12):
            hidden = self.cell(value, hidden)
            prediction = self.out(hidden)
            predictions.append(prediction)
            value = prediction
            if random.random() < 0.5:
                value = x[:, position : position + 1]
        return torch.cat(predictions, 1)


model = Decoder()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.mse_loss(model(x), x[:, 1:]))
report(losses, model)
