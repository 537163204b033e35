"""Evaluation with a DistributedSampler counts some samples twice.

Mistake: the sampler repeats samples until their number is a multiple of the ranks, and accuracy counts the copies.
Rule: every sample counts once. Ranks may have different numbers of samples; only sums are exchanged.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep

Counted = tuple[int, float]  # samples, accuracy


def classifier_and_data() -> tuple[nn.Module, TensorDataset]:
    """Return a model that predicts the largest coordinate as the class, and 361 noisy points of 10 classes."""
    torch.manual_seed(0)
    inputs = torch.randn(361, 10)
    classes = (inputs + torch.randn(361, 10)).argmax(dim=1)
    model = nn.Linear(10, 10, bias=False)
    nn.init.eye_(model.weight)
    return model, TensorDataset(inputs, classes)


def one_process() -> Counted:
    """Plain torch on all samples."""
    model, data = classifier_and_data()
    inputs, classes = data.tensors
    return len(classes), float((model(inputs).argmax(dim=1) == classes).double().mean())


def usual_way() -> Counted:
    """Each rank counts the samples of its sampler; counts are summed over ranks."""
    model, data = classifier_and_data()
    sampler = DistributedSampler(data, shuffle=False)
    totals = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        for inputs, classes in DataLoader(data, batch_size=32, sampler=sampler):
            hits = model(inputs).argmax(dim=1) == classes
            totals += torch.tensor([len(classes), int(hits.sum())])
    dist.all_reduce(totals)
    return int(totals[0]), float(totals[1] / totals[0].double())


class Accuracy:
    """Metric with a sum per rank and one all-reduce at the end."""

    name = "accuracy"

    def __init__(self) -> None:
        self._counts = torch.zeros(2, dtype=torch.int64)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        hits = outputs.argmax(dim=1) == targets
        self._counts += torch.tensor([len(targets), int(hits.sum())])

    def compute(self, world: samestep.World) -> float:
        world.all_reduce(self._counts)
        return float(self._counts[1] / self._counts[0].double())


def samestep_way(world: samestep.World) -> Counted:
    """Samestep's loader adds no padding."""
    model, data = classifier_and_data()
    engine = samestep.Engine(model, torch.optim.SGD(model.parameters()), samestep.cross_entropy, world=world)
    values = engine.evaluate(samestep.loader(data, batch_size=128, microbatches=4, world=world), [Accuracy()])
    return int(values["samples"]), values["accuracy"]


def on_ranks() -> tuple[Counted, Counted]:
    """Return both results, computed in the same ranks."""
    with samestep.start(device="cpu") as world:
        return usual_way(), samestep_way(world)


def main() -> tuple[Counted, Counted, Counted]:
    """Print and return the counts of each method."""
    results = (one_process(), *samestep.launch(on_ranks, processes=4))
    names = ("one process", "DistributedSampler on 4", "samestep on 4")
    for name, (samples, accuracy) in zip(names, results, strict=True):
        print(f"{name:24}  {samples} samples, accuracy {accuracy:.4%}")
    return results


if __name__ == "__main__":
    main()
