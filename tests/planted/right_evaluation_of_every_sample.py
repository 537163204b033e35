"""A metric of summed counts, over a number of samples that no number of processes divides."""

import torch
from parts import Net, Points, batches_of, evaluation, fit, seeded, sgd

import samestep


class Accuracy:
    name = "accuracy"

    def __init__(self) -> None:
        self.correct, self.count = 0, 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.correct += int((outputs.argmax(1) == targets).sum())
        self.count += len(targets)

    def compute(self, world: samestep.World) -> float:
        counts = torch.tensor([self.correct, self.count])
        world.all_reduce(counts)
        return float(counts[0] / counts[1])


with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points()))
    engine.evaluate(evaluation(world, 27), [Accuracy()])
