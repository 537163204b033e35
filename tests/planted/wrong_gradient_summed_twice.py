"""A hook sums gradients over ranks in addition to the engine."""

import torch
import torch.distributed as dist
from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(context: object, total: torch.Tensor) -> torch.Tensor:
        return total.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * dist.get_world_size()


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
    result = samestep.cross_entropy(outputs, targets)
    return samestep.Loss(Summed.apply(result.sum), result.count)


with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), loss, world=world)
    fit(engine, batches_of(world, Points()))
