"""Two terms with different counts: tokens and lines."""

import torch
from parts import Lines, TokenNet, batches_of, fit, seeded, sgd
from torch.nn import functional

import samestep


def tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=-100, reduction="sum")


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean(dim=(1, 2)).sum()


LOSS = samestep.MultiLoss(
    [
        samestep.LossTerm("tokens", tokens, count=lambda targets: (targets != -100).sum()),
        samestep.LossTerm("spread", spread, weight=0.1),
    ]
)

with samestep.start() as world:
    model = seeded(TokenNet)
    engine = samestep.Engine(model, sgd(model), LOSS, world=world)
    fit(engine, batches_of(world, Lines()))
    engine.evaluate(samestep.loader(Lines(29), batch_size=10, microbatches=8, world=world))
