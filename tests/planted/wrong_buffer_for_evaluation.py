"""A running mean for evaluation, kept in a dict."""

import torch
from parts import Plain, Points, batches_of, evaluation, fit, seeded, sgd
from torch import nn

import samestep


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"mean": torch.zeros(())}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.state["mean"] = 0.9 * self.state["mean"] + 0.1 * values.detach().mean()
            return values - values.mean()
        return values - self.state["mean"]


with samestep.start() as world:
    model = seeded(Plain, Centred())
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points()))
    engine.evaluate(evaluation(world))
