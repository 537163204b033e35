"""A second head is used only for microbatches whose first sample has a certain sign."""

import torch
from parts import CLASSES, FEATURES, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.second = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.head(inputs)
        return outputs + self.second(inputs) if inputs[0, 0] > 0 else outputs


model = samestep.parallel(seeded(TwoHeads))
fit(model, sgd(model), batches_of(Points()))
