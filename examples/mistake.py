"""Script with a mistake: noise from a generator whose state continues from sample to sample."""

import numpy
import torch
from torch import nn

import samestep


class Noisy:
    """Points with noise that depends on the number of points computed before in this process."""

    def __init__(self) -> None:
        self.inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
        self.generator = numpy.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.from_numpy(self.generator.normal(scale=0.1, size=8)).float()
        return self.inputs[index] + noise, self.inputs[index, :3].argmax()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with samestep.start() as world:
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world)
    for batch in samestep.loader(Noisy(), batch_size=64, microbatches=8, shuffle=True, world=world):
        engine.step(batch)
