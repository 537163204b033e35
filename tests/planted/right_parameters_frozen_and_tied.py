"""A frozen layer, and weights that two layers share."""

import torch
from parts import Points, batches_of, fit, seeded
from torch import nn

import samestep


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.second.weight = self.first.weight
        self.head.weight.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


model = seeded(Tied)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
model = samestep.parallel(model)
fit(model, torch.optim.AdamW(trained, lr=0.01), batches_of(Points()))
