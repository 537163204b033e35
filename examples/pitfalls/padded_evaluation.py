"""Evaluation with a DistributedSampler counts some samples twice.

Mistake: the sampler repeats samples until their number is a multiple of the ranks, and accuracy counts the copies.
Rule: every sample counts once, in the loop of one device.
"""

from tempfile import TemporaryDirectory

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


def samestep_way() -> Counted:
    """The evaluation of one device: every rank sees all batches, and the calls of the model are divided."""
    model, data = classifier_and_data()
    model = samestep.parallel(model, strict=True)
    samples = hits = 0
    with torch.no_grad():
        for inputs, classes in DataLoader(data, batch_size=32):
            samples += len(classes)
            hits += int((model(inputs).argmax(dim=1) == classes).sum())
    return samples, hits / samples


def on_ranks(address: str) -> tuple[Counted, Counted]:
    """Return both results, computed in the same ranks; the usual way has a process group of its own."""
    world = samestep.init(device="cpu")
    ours = samestep_way()
    dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
    return usual_way(), ours


def main() -> tuple[Counted, Counted, Counted]:
    """Print and return the counts of each method."""
    with TemporaryDirectory() as folder:
        results = (one_process(), *samestep.launch(on_ranks, f"file://{folder}/group", processes=4))
    names = ("one process", "DistributedSampler on 4", "samestep on 4")
    for name, (samples, accuracy) in zip(names, results, strict=True):
        print(f"{name:24}  {samples} samples, accuracy {accuracy:.4%}")
    return results


if __name__ == "__main__":
    main()
