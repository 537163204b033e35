"""The mean over the tokens of a microbatch: microbatches with little padding have too little weight."""

import torch
from parts import Lines, TokenNet, batches_of, fit, seeded, sgd
from torch.nn import functional

import samestep


def mean_over_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over the targets of a microbatch that are not padding."""
    return functional.cross_entropy(outputs, targets, ignore_index=-100)


with samestep.start() as world:
    model = seeded(TokenNet)
    engine = samestep.Engine(model, sgd(model), mean_over_tokens, world=world)
    fit(engine, batches_of(world, Lines()))
