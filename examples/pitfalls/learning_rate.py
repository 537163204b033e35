"""A learning rate multiplied by the number of ranks makes the result a function of the machine.

Mistake: `lr * world_size` with a fixed batch per device. More devices take fewer steps with larger batches and rates.
Rule: batch size and learning rate belong to the global batch. Devices only divide the work of a step.
"""

from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep

PROCESSES = (1, 2, 4)
Result = tuple[int, float]  # steps, loss over all data


def model_and_data() -> tuple[nn.Module, TensorDataset]:
    """Return a small classifier and 512 samples."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 20)
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5)), TensorDataset(
        inputs, inputs[:, :5].argmax(1)
    )


def result_of(model: nn.Module, data: TensorDataset, steps: int) -> Result:
    inputs, classes = data.tensors
    with torch.no_grad():
        loss = float(functional.cross_entropy(model(inputs), classes))
    return steps, loss


def usual_way(size: int) -> Result:
    """Three epochs with batches of 16 per rank and the rate times the number of ranks."""
    model, data = model_and_data()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * size, momentum=0.9)
    sampler = DistributedSampler(data, shuffle=True)
    steps = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, classes in DataLoader(data, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            functional.cross_entropy(wrapped(inputs), classes).backward()
            optimizer.step()
            steps += 1
    return result_of(model, data, steps)


def samestep_way() -> Result:
    """Three epochs of the loop of one device, with batches of 64 and the rate of the usual way on 4."""
    model, data = model_and_data()
    model = samestep.parallel(model, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    steps = 0
    for _ in range(3):
        for inputs, classes in samestep.loader(data, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), classes).backward()
            optimizer.step()
            steps += 1
    return result_of(model, data, steps)


def on_ranks(address: str) -> tuple[Result, Result]:
    """Return both results, computed in the same ranks; the usual way has a process group of its own."""
    world = samestep.init(device="cpu", threads=1)
    ours = samestep_way()
    dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
    return usual_way(world.size), ours


def main() -> tuple[list[Result], list[Result]]:
    """Print and return the results of both methods on 1, 2 and 4 processes."""
    with TemporaryDirectory() as folder:
        pairs = [
            samestep.launch(on_ranks, f"file://{folder}/{size}", processes=size)
            for size in PROCESSES
        ]
    usual, ours = zip(*pairs, strict=True)
    for name, results in (("lr x ranks", usual), ("samestep", ours)):
        for size, (steps, loss) in zip(PROCESSES, results, strict=True):
            print(f"{name:10} on {size}  {steps} steps, loss {loss:.5f}")
    return list(usual), list(ours)


if __name__ == "__main__":
    main()
